"""Entry points as torch ops, for torch.compile, torch.export and tracing."""
