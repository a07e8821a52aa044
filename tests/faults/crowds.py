"""Many processes that do the same thing at the same moment."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


def crowd(count: int, work: Callable[[int], object], *, seconds: int = 60) -> list[int]:
    """Run ``work(number)`` in forked processes that are let go together; return exit statuses.

    A process that takes longer than ``seconds`` is ended by its alarm, and its status says so.
    """
    ready, arrived = os.pipe()
    go, gate = os.pipe()
    members = []
    for number in range(count):
        member = os.fork()
        if member == 0:
            os.close(gate)
            _take_part(lambda: work(number), arrived, go, seconds)  # noqa: B023 - called at once
        members.append(member)
    os.close(go)
    os.close(arrived)
    while os.read(ready, count):  # until the last one has closed its end
        pass
    os.close(ready)
    os.close(gate)
    return [os.waitstatus_to_exitcode(os.waitpid(member, 0)[1]) for member in members]


def _take_part(work: Callable[[], object], arrived: int, go: int, seconds: int) -> NoReturn:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
    status = 1
    try:
        os.close(arrived)
        os.read(go, 1)
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - a child must never return into pytest
        traceback.print_exc()
    finally:
        os._exit(status)


def say(folder: Path, word: Any) -> None:
    """Leave a word in a folder; those of all processes are together in :func:`heard`."""
    with (folder / "said").open("ab", buffering=0) as file:
        file.write(json.dumps(word).encode() + b"\n")


def heard(folder: Path) -> list[Any]:
    """Return every word that was said in a folder."""
    file = folder / "said"
    return [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []
