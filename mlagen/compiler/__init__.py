"""Compile stage: finding NVRTC, its options, and its log."""
