"""Byte progress: one line per step, and a bar while the step runs on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .report import console


@contextmanager
def byte_progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback for the bytes done and the total bytes, 0 if the total is unknown."""
    output = console(stderr=True)
    if not output.is_terminal:
        output.print(doing, soft_wrap=True)
        yield lambda _done, _total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    from rich.table import Column

    columns = (
        BarColumn(bar_width=16),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        # The only column that shrinks on a narrow terminal.
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
    )
    with Progress(*columns, console=output, transient=True, expand=True) as progress:
        task = progress.add_task(doing, total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, total=total or None, completed=done)

        yield show
