"""The `mlagen` command: prewarm kernels, look at the cache, examine the machine, demo, bench."""
