"""Progress: a line per finished part, and on a terminal the current work."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from rich.console import Console

import mlagen
from cache_tools.benchmark.run import Step
from cache_tools.output import progress
from cache_tools.output.byte_progress import byte_progress
from cache_tools.output.compile_estimate import SECONDS, about_text
from cache_tools.output.progress import bench_progress, prewarm_progress
from cache_tools.tools.interrupts import Interrupted
from mlagen.prewarming import PrewarmEvent, PrewarmUnit
from mlagen.spec.arch import parse_arch
from mlagen.spec.families import FAMILIES, specs_of
from mlagen.spec.kernel import KernelSpec

FIRST, SECOND = specs_of(parse_arch("sm_80"), ["combine"], dtype=["bf16"])[:2]
DIMS = "combine sm_80 bf16 dims"


def unit(**facts: Any) -> PrewarmUnit:
    """Return a built kernel with other fields."""
    known = {"spec": FIRST, "key": "0" * 64, "toolchain": "nvrtc-13.5.37", "status": "built"}
    return PrewarmUnit(**{**known, "ms": 88.0, "registers": 32, "spill_bytes": 0, **facts})


def event(kind: Any, of: PrewarmUnit | None = None, **facts: Any) -> PrewarmEvent:
    """Return an event of the first of two kernels, with other fields."""
    return PrewarmEvent(kind=kind, **{"spec": FIRST, "unit": of, "done": 0, "total": 2, **facts})


FAILURE = unit(status="failed", registers=None, error=mlagen.ToolchainError("arch: no"))
SLOW = unit(status="timeout", ms=2000.0, error=mlagen.CompileError("no", log="", source=""))


@pytest.mark.parametrize(
    ("reported", "line"),
    [
        (event("finished", unit()), f"built     88 ms  {DIMS} 512: 32 registers"),
        (
            event("finished", unit(status="hit", ms=0.25, spill_bytes=8)),
            f"hit      250 us  {DIMS} 512: 32 registers, 8 bytes spilled",
        ),
        (event("finished", FAILURE), f"failed    88 ms  {DIMS} 512: arch: no"),
        (event("loaded"), f"loaded           {DIMS} 512"),
    ],
    ids=["built", "found, with spills", "failed", "loaded"],
)
def test_each_kernel_is_one_plain_line(
    reported: PrewarmEvent, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal each event is printed once, without control characters."""
    with prewarm_progress(set()) as on_event:
        on_event(reported)

    assert capsys.readouterr() == ("", line + "\n")


def planned(
    capsys: pytest.CaptureFixture[str], specs: list[KernelSpec], **options: Any
) -> list[str]:
    """Return the lines about the start of a prewarm that compiles these kernels."""
    with prewarm_progress(set(), **options) as on_event:
        for spec in specs:
            on_event(event("missing", spec=spec, done=3))
        assert capsys.readouterr().err == ""
        for spec in specs[:2]:
            on_event(event("started", spec=spec, done=3))
    return capsys.readouterr().err.splitlines()


def test_the_plan_is_one_line_before_the_first_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    """It counts missing and cached kernels, and estimates the time by family and jobs."""
    sm80 = specs_of(parse_arch("sm_80"), ["mla_sm80"])[:40]

    lines = [*planned(capsys, [FIRST, SECOND]), *planned(capsys, sm80, jobs=4)]

    assert lines == [
        "compiling 2 kernels, 3 cached: about 1 s",
        "compiling 40 kernels, 3 cached: about 6 s",
    ]


def test_compiled_kernels_are_kept() -> None:
    """A hit is no kept kernel."""
    kept: set[KernelSpec] = set()

    with prewarm_progress(kept) as on_event:
        on_event(event("finished", unit(status="hit")))
        on_event(event("finished", unit(spec=SECOND), spec=SECOND))

    assert kept == {SECOND}


def test_durations_are_rough_and_every_family_has_an_estimate() -> None:
    """A long duration has no small unit."""
    texts = {0.1: "1 s", 89.0: "89 s", 90.0: "2 min", 5399.0: "90 min", 7200.0: "2 h"}

    assert [about_text(s) for s in texts] == [f"about {text}" for text in texts.values()]
    assert SECONDS.keys() == set(FAMILIES)


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Send progress to a terminal, and return its output."""
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr(progress, "console", lambda **_: terminal)
    return screen


@pytest.mark.parametrize("is_terminal", [False, True], ids=["a file", "a terminal"])
def test_quiet_is_a_line_for_each_failure(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quiet run has no bar."""
    screen = terminal_of(monkeypatch) if is_terminal else None
    finished = [event("finished", each) for each in (unit(), SLOW)]

    with prewarm_progress(set(), is_quiet=True) as on_event:
        for each in (event("missing"), event("started"), *finished, event("loaded")):
            on_event(each)

    shown = screen.getvalue() if screen is not None else capsys.readouterr().err
    assert shown == f"timeout   2.0 s  {DIMS} 512: no\n"


def test_a_terminal_shows_the_compiling_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar counts kernels, names the one that compiles the longest, and has a time left."""
    screen = terminal_of(monkeypatch)

    with prewarm_progress(set()) as on_event:
        for kind in ("missing", "started"):
            on_event(event(kind))
            on_event(event(kind, spec=SECOND))
        on_event(event("finished", unit(), done=1))

    for part in ("1/2", "about 1 s left", f"compiling {DIMS} 256"):
        assert part in screen.getvalue()


STEPS = (
    Step(name="ceilings", done=0, total=3),
    Step(name="ceilings", done=1, total=3, line="read 4000 GB/s"),
    Step(name="mla bf16", done=1, total=3),
)


@pytest.mark.parametrize("is_terminal", [False, True], ids=["a file", "a terminal"])
def test_each_part_of_a_benchmark_is_one_line(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is printed at its end; the bar of a terminal counts parts and names the current one."""
    screen = terminal_of(monkeypatch) if is_terminal else None

    with bench_progress() as on_step:
        for step in STEPS:
            on_step(step)

    printed = capsys.readouterr()
    assert printed == ("", "" if is_terminal else "read 4000 GB/s\n")
    for part in ("read 4000 GB/s", "1/3", "measuring mla bf16"):
        assert screen is None or part in screen.getvalue()


def test_an_interrupted_benchmark_says_what_was_measured() -> None:
    """The interrupt counts the finished parts."""

    def interrupted() -> None:
        with bench_progress() as on_step:
            on_step(STEPS[1])
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=r"^1 of 3 parts measured$"):
        interrupted()


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


@pytest.mark.parametrize("is_terminal", [False, True], ids=["a file", "a terminal"])
def test_a_step_of_bytes_is_one_line_or_a_bar(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar shows the bytes done, the total and the step; an unknown total is no error."""
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")

    with byte_progress("uploading to memory://x") as on_progress:
        on_progress(1 << 19, 0)
        on_progress(1 << 20, 2 << 20)

    shown = stream.getvalue()
    assert "1.0/2.0 MiB" in shown if is_terminal else shown == "uploading to memory://x\n"
    assert "uploading to memory://x" in shown
