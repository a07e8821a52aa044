"""Concurrent processes that do the same work."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tests.cache import builds


def crowd(count: int, work: Callable[[int], object], *, seconds: int = 60) -> list[int]:
    """Run ``work(number)`` in forked processes that start together; return exit statuses.

    A process that takes longer than ``seconds`` is killed by SIGALRM, which is its status.
    """
    ready, arrived = os.pipe()
    go, gate = os.pipe()
    children = []
    for number in range(count):
        child = builds.fork()
        if child == 0:
            os.close(gate)
            _take_part(lambda: work(number), arrived, go, seconds)  # noqa: B023 - called at once
        children.append(child)
    os.close(go)
    os.close(arrived)
    while os.read(ready, count):  # until every process has closed its end
        pass
    os.close(ready)
    os.close(gate)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


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


def send(folder: Path, message: Any) -> None:
    """Write a message into a folder; :func:`received` returns those of all processes."""
    with (folder / "messages").open("ab", buffering=0) as file:
        file.write(json.dumps(message).encode() + b"\n")


def received(folder: Path) -> list[Any]:
    """Return all messages in a folder."""
    file = folder / "messages"
    return [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []
