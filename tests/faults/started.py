"""A program that starts processes by a given method; all share a cache.

It builds one kernel, then starts four processes that find it and request another one concurrently.
Each reports its actions. Usage: python -m tests.faults.started FOLDER spawn|forkserver|fork|exec
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

from mlagen.artifacts import Build
from tests.cache.builds import ROOT, make_build, make_key, wait_for
from tests.faults.crowds import received, send
from tests.faults.steps import KEY, store_in

OTHER = make_key("another kernel")
COUNT = 4


def take_part(folder: Path) -> None:
    """Find one kernel, and build or find the other after all processes have started."""
    store = store_in(folder)
    assert store.find(KEY) is not None
    send(folder, "ready")
    wait_for(lambda: received(folder).count("ready") == COUNT, seconds=40)

    def build() -> Build:
        send(folder, "built")
        return make_build()

    assert store.find_or_build(OTHER, build).path is not None
    send(folder, "done")


def main(folder: Path, method: str) -> None:
    """Start the processes and wait for them."""
    store_in(folder).find_or_build(KEY, make_build)
    if method == "exec":  # like torchrun
        ranks = [{"RANK": str(rank), "WORLD_SIZE": str(COUNT)} for rank in range(COUNT)]
        command = [sys.executable, "-m", "tests.faults.started", str(folder), "rank"]
        children = [
            subprocess.Popen(command, cwd=ROOT, env={**os.environ, **rank}) for rank in ranks
        ]
        assert [child.wait(60) for child in children] == [0] * COUNT
        return
    context = multiprocessing.get_context(method)
    processes = [context.Process(target=take_part, args=(folder,)) for _ in range(COUNT)]  # type: ignore[attr-defined]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * COUNT


if __name__ == "__main__":
    if "RANK" in os.environ:
        take_part(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), sys.argv[2])
