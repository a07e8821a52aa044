"""A process that requests one kernel: prints ready, waits for the file ``go``, builds or finds.

Each build appends a line with the process id to ``FOLDER/builds`` before it takes its time.
Usage: python -m tests.cache.worker FOLDER SECONDS
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from mlagen.artifacts import Build
from tests.cache.builds import CUBIN, make_build, make_key, make_store, wait_for


def main(folder: Path, seconds: float) -> None:
    """Request the kernel and print the source of its bytes."""

    def build() -> Build:
        with (folder / "builds").open("ab", buffering=0) as marker:
            marker.write(b"%d\n" % os.getpid())
        time.sleep(seconds)
        return make_build()

    (folder / f"ready.{os.getpid()}").touch()
    wait_for((folder / "go").exists)
    entry = make_store(folder).find_or_build(make_key(), build)
    print("intact" if entry.cubin == CUBIN and entry.path else "damaged")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
