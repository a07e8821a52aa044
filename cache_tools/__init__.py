"""The `mlagen` command: prewarm kernels, look at the cache, examine the machine, see a demo."""
