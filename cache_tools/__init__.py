"""The `mlagen` command: prewarm kernels, inspect the cache, check the machine, demo, bench."""
