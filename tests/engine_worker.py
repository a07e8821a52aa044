"""A process that asks the engine for one real kernel, together with others.

It says it is ready, waits for the file ``go``, and prints the digest of the bytes it got. What it
logs on the way, every process appends to ``FOLDER/log``: ``PID compiling ...``.
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
    """Ask for the kernel and print the SHA-256 of its machine code."""
    logging.basicConfig(
        filename=folder / "log", filemode="a", level=logging.INFO, format="%(process)d %(message)s"
    )
    (folder / f"ready.{os.getpid()}").touch()
    wait_for((folder / "go").exists)
    cubin = find_or_build(WIDE_DECODE).entry.cubin
    print(hashlib.sha256(cubin).hexdigest())  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
