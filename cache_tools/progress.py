"""Progress of long work: a line per finished part, and on a terminal a bar below them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .report import console, kernel_text, time_text

if TYPE_CHECKING:
    from rich.console import Console

    from mlagen.prewarming import PrewarmEvent, PrewarmUnit
    from mlagen.spec.kernel import KernelSpec

    from .benchmark.run import Step


@contextmanager
def prewarm_progress(*, is_quiet: bool = False) -> Iterator[Callable[[PrewarmEvent], None]]:
    """Yield a callback for :func:`mlagen.prewarm` that prints on stderr; if quiet, failures."""
    output = console(stderr=True)
    compiling: dict[KernelSpec, str] = {}
    with _bar(output, is_quiet=is_quiet) as show:

        def on_event(event: PrewarmEvent) -> None:
            if not is_quiet or (event.unit is not None and event.unit.error is not None):
                _print_line(output, event)
            if event.kind == "started":
                compiling[event.spec] = _name(event.spec)
            else:
                compiling.pop(event.spec, None)
            waiting = f"compiling {next(iter(compiling.values()))}" if compiling else ""
            if len(compiling) > 1:
                waiting += f", and {len(compiling) - 1} more"
            show(waiting, event.done, event.total)

        yield on_event


@contextmanager
def bench_progress() -> Iterator[Callable[[Step], None]]:
    """Yield a callback for a benchmark that prints on stderr."""
    output = console(stderr=True)
    with _bar(output) as show:

        def on_step(step: Step) -> None:
            if step.line is not None:
                output.print(step.line, soft_wrap=True)
            waiting = f"measuring {step.name}" if step.line is None else ""
            show(waiting, step.done, step.total)

        yield on_step


@contextmanager
def _bar(output: Console, *, is_quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback that shows the current work and how many parts of the total are done."""
    if is_quiet or not output.is_terminal:
        yield lambda _waiting, _done, _total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    columns = (
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        # The only column that shrinks on a narrow terminal.
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
    )
    try:
        with Progress(*columns, console=output, transient=True, expand=True) as progress:
            task = progress.add_task("", total=None)

            def show(waiting: str, done: int, total: int) -> None:
                progress.update(task, total=total, completed=done, description=waiting)

            yield show
    finally:
        output.show_cursor()  # an interrupt may come while the bar hides it


def _print_line(output: Console, event: PrewarmEvent) -> None:
    if event.unit is not None:
        output.print(_line(event.unit), soft_wrap=True)
    elif event.kind == "loaded":
        output.print(f"{event.kind:17}{_name(event.spec)}", soft_wrap=True)


def _name(spec: KernelSpec) -> str:
    return kernel_text(spec.family, spec.key_fields())


def _line(unit: PrewarmUnit) -> str:
    text = f"{unit.status:8}{time_text(unit.ms):>7}  {_name(unit.spec)}"
    if unit.error is not None:
        return f"{text}: {unit.error}"
    if unit.registers is not None:
        text += f": {unit.registers} registers"
    if unit.spill_bytes:
        text += f", {unit.spill_bytes} bytes spilled"
    return text
