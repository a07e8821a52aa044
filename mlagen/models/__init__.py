"""Model configurations: the fields of a published config.json that select kernels."""
