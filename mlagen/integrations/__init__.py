"""Programs that call mlagen: one package each, which only its user imports."""
