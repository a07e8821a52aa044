"""`python3 -m cache_tools`, the same command as `mlagen`."""

from __future__ import annotations

from .cli import main

main()
