"""Sparse attention over an FP8 KV cache."""
