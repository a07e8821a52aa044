"""The on-disk kernel cache: keys, entries, and the store that looks up and publishes them."""
