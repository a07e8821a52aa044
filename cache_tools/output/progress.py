"""Progress of long work: a line per finished part, and on a terminal a bar below them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlagen.logs import visible

from ..tools.interrupts import summarized
from .report import age_text, console, count_text, kernel_text, size_text, time_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from mlagen.prewarming import PrewarmEvent, PrewarmUnit
    from mlagen.spec.kernel import KernelSpec

    from ..benchmark.outcomes import Step

# Kernels of a prewarm from which on a line says how to select fewer.
MANY = 200

_FEWER = (
    "for fewer: --model NAME with --tp, or --family with --dtype, --kv-dtype, --page-size and "
    "--heads; Ctrl-C keeps finished kernels"
)

# What the bar shows: the current work, the counted parts, and the work done and in all.
Show = Callable[[str, str, float, "float | None"], None]


# The terminal echoes Ctrl-C as ``^C`` behind the bar. A bar of full width would be moved to the
# line above by it, and stay on the screen.
_FREE_COLUMNS = 8


@contextmanager
def prewarm_progress(
    kept: set[KernelSpec],
    *,
    selects_all: bool = False,
    is_quiet: bool = False,
) -> Iterator[Callable[[PrewarmEvent], None]]:
    """Yield a callback for :func:`mlagen.prewarm` that prints on stderr; if quiet, failures.

    It adds the compiled kernels to ``kept``; ``selects_all`` is whether the prewarm names neither
    models nor kernels.
    """
    output = console(stderr=True)
    compiling: dict[KernelSpec, str] = {}
    missing: set[KernelSpec] = set()
    finished = 0
    with _bar(output, is_quiet=is_quiet) as show:

        def on_event(event: PrewarmEvent) -> None:
            nonlocal finished
            if event.unit is not None and event.unit.status == "built":
                kept.add(event.spec)
            if event.kind == "missing":
                missing.add(event.spec)
            elif event.kind == "started":
                if not is_quiet and not compiling and not finished:
                    _print_plan(output, event.done, len(missing), selects_all=selects_all)
                compiling[event.spec] = _name(event.spec)
            elif event.kind == "finished" and event.spec in missing:
                compiling.pop(event.spec, None)
                finished += 1
            if not is_quiet or (event.unit is not None and event.unit.error is not None):
                _print_line(output, event)
            waiting = f"compiling {next(iter(compiling.values()))}" if compiling else ""
            if len(compiling) > 1:
                waiting += f", and {len(compiling) - 1} more"
            # A running kernel counts as half compiled.
            done = finished + len(compiling) / 2 if finished else 0.0
            show(waiting, f"{finished}/{len(missing)}", done, len(missing) or None)

        yield on_event


@contextmanager
def bench_progress() -> Iterator[Callable[[Step], None]]:
    """Yield a callback for a benchmark that prints on stderr."""
    output = console(stderr=True)
    done = total = 0
    with (
        summarized(lambda: f"{done} of {count_text(total, 'part')} measured"),
        _bar(output) as show,
    ):

        def on_step(step: Step) -> None:
            nonlocal done, total
            done, total = step.done, step.total
            if step.line is not None:
                output.print(step.line, soft_wrap=True)
            waiting = f"measuring {step.name}" if step.line is None else ""
            show(waiting, f"{step.done}/{step.total}", step.done, step.total)

        yield on_step


@contextmanager
def byte_progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback for the bytes done and the total bytes, 0 if the total is unknown."""
    output = console(stderr=True)
    if not output.is_terminal:
        output.print(doing, soft_wrap=True)
    with _bar(output) as show:

        def on_progress(done: int, total: int) -> None:
            of_total = f" of {size_text(total)}" if total else ""
            show(doing, f"{size_text(done)}{of_total}", done, total or None)

        on_progress(0, 0)
        yield on_progress


@contextmanager
def _bar(output: Console, *, is_quiet: bool = False) -> Iterator[Show]:
    """Yield a callback of a bar that disappears at the end of the work, and at Ctrl-C.

    It shows the part that is done, the time left and the current work.
    """
    if is_quiet or not output.is_terminal:
        yield lambda _waiting, _counted, _done, _total: None
        return
    from rich.constrain import Constrain
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    class Bar(Progress):
        def get_renderable(self) -> RenderableType:
            return Constrain(super().get_renderable(), max(output.width - _FREE_COLUMNS, 1))

    columns = (
        BarColumn(bar_width=16),
        TextColumn("{task.fields[counted]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
    )
    try:
        with Bar(*columns, console=output, transient=True, expand=True) as progress:
            task = progress.add_task("", total=None, counted="", left="")
            start = time.monotonic()

            def show(waiting: str, counted: str, done: float, total: float | None) -> None:
                # Not rich's estimate: parallel kernels finish in bursts, which it takes for speed.
                elapsed = time.monotonic() - start
                seconds = elapsed * (total / done - 1) if done and total else 0.0
                left = f"about {age_text(seconds).removesuffix(' ago')} left" if seconds else ""
                text = visible(waiting, kept="")
                progress.update(task, total=total, completed=done, description=text)
                progress.update(task, counted=counted, left=left)

            yield show
    finally:
        output.show_cursor()  # an interrupt may come while the bar hides it


def _print_plan(output: Console, cached: int, missing: int, *, selects_all: bool) -> None:
    """Print what is about to be compiled, or that it is missing where nothing may be compiled."""
    from mlagen.compiler.toolchain import is_installed
    from mlagen.settings import current_settings

    kernels, settings = count_text(missing, "kernel"), current_settings()
    if settings.jit == "off" or not is_installed(settings.toolchain):
        output.print(f"{kernels} missing, {cached} cached", soft_wrap=True)
        return
    output.print(f"compiling {kernels}, {cached} cached", soft_wrap=True)
    if selects_all and missing >= MANY:
        output.print(_FEWER, soft_wrap=True)


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
