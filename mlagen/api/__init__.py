"""What the entry points share: argument checks, tensors to specs, and the CPU backend."""
