"""Models by their published configuration: what of it decides about kernels."""
