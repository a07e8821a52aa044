"""A process that requests one real kernel from the engine, concurrently with others.

It reports ready, waits for the file ``go``, and prints the digest of the cubin. Every process
appends its log to ``FOLDER/log``: ``PID compiling ...``.
Usage: python -m tests.engine_worker FOLDER
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from pathlib import Path

from mlagen.engine import find_or_build
from tests.cache.builds import wait_for
from tests.kernels import WIDE_DECODE


def main(folder: Path) -> None:
    """Request the kernel and print the SHA-256 of its cubin."""
    logging.basicConfig(
        filename=folder / "log", filemode="a", level=logging.INFO, format="%(process)d %(message)s"
    )
    (folder / f"ready.{os.getpid()}").touch()
    wait_for((folder / "go").exists)
    cubin = find_or_build(WIDE_DECODE).entry.cubin
    print(hashlib.sha256(cubin).hexdigest())  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
