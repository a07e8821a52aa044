"""Byte progress: one line per step, and a bar while the step runs on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .bars import transient_bar
from .report import console


@contextmanager
def byte_progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback for the bytes done and the total bytes, 0 if the total is unknown."""
    output = console(stderr=True)
    if not output.is_terminal:
        output.print(doing, soft_wrap=True)
        yield lambda _done, _total: None
        return
    from rich.progress import DownloadColumn, TransferSpeedColumn

    columns = (DownloadColumn(binary_units=True), TransferSpeedColumn())
    with transient_bar(output, *columns) as progress:
        task = progress.add_task(doing, total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, total=total or None, completed=done)

        yield show
