"""Compile stage: finding NVRTC, the process that calls it, its options, and its log."""
