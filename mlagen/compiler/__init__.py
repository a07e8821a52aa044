"""Source to cubin: finding NVRTC, its options, and what it says."""
