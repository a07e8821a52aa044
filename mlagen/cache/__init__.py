"""Where kernels are kept: keys, entries, and the store that finds and publishes them."""
