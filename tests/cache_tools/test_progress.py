"""Progress: a line per finished part, and on a terminal the current work."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import mlagen
from cache_tools import progress
from cache_tools.benchmark.run import Step
from cache_tools.progress import bench_progress, prewarm_progress
from mlagen.prewarming import PrewarmEvent, PrewarmUnit
from mlagen.spec.arch import parse_arch
from mlagen.spec.families import specs_of

FIRST, SECOND = specs_of(parse_arch("sm_80"), ["combine"], dtype=["bf16"])[:2]


def unit(**facts: object) -> PrewarmUnit:
    """Return a built kernel with other fields."""
    known: dict[str, object] = {
        "spec": FIRST,
        "key": "0" * 64,
        "toolchain": "nvrtc-13.5.37",
        "status": "built",
        "ms": 88.0,
        "registers": 32,
        "spill_bytes": 0,
    }
    return PrewarmUnit(**{**known, **facts})  # type: ignore[arg-type]


def event(kind: str, of: PrewarmUnit | None = None, **facts: object) -> PrewarmEvent:
    """Return an event of the first of two kernels, with other fields."""
    known: dict[str, object] = {"spec": FIRST, "unit": of, "done": 0, "total": 2}
    return PrewarmEvent(kind=kind, **{**known, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reported", "line"),
    [
        (
            event("finished", unit()),
            "built     88 ms  combine sm_80 bf16 dims 512: 32 registers",
        ),
        (
            event("finished", unit(status="hit", ms=0.25, spill_bytes=8)),
            ("hit      250 us  combine sm_80 bf16 dims 512: 32 registers, 8 bytes spilled"),
        ),
        (
            event(
                "finished",
                unit(status="failed", registers=None, error=mlagen.ToolchainError("arch: no")),
            ),
            "failed    88 ms  combine sm_80 bf16 dims 512: arch: no",
        ),
        (event("loaded"), "loaded           combine sm_80 bf16 dims 512"),
    ],
    ids=["built", "found, with spills", "failed", "loaded"],
)
def test_each_kernel_is_one_plain_line(
    reported: PrewarmEvent, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal each event is printed once, without control characters."""
    with prewarm_progress() as on_event:
        on_event(event("started"))
        on_event(reported)

    out, err = capsys.readouterr()
    assert (out, err) == ("", line + "\n")


@pytest.mark.parametrize("is_terminal", [False, True], ids=["a file", "a terminal"])
def test_quiet_is_a_line_for_each_failure(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quiet run has no bar."""
    screen = terminal_of(monkeypatch) if is_terminal else None
    slow = unit(status="timeout", ms=2000.0, error=mlagen.CompileError("no", log="", source=""))

    with prewarm_progress(is_quiet=True) as on_event:
        on_event(event("started"))
        on_event(event("finished", unit()))
        on_event(event("finished", slow))
        on_event(event("loaded"))

    shown = screen.getvalue() if screen is not None else capsys.readouterr().err
    assert shown == "timeout   2.0 s  combine sm_80 bf16 dims 512: no\n"


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Send progress to a terminal, and return its output."""
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr(progress, "console", lambda **_: terminal)
    return screen


def test_a_terminal_shows_the_compiling_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar counts kernels and names the one that compiles the longest."""
    screen = terminal_of(monkeypatch)

    with prewarm_progress() as on_event:
        on_event(event("started"))
        on_event(event("started", spec=SECOND))
        on_event(event("finished", unit(), done=1))

    shown = screen.getvalue()
    assert "1/2" in shown
    assert "compiling combine sm_80 bf16 dims 256" in shown


STEPS = (
    Step(name="ceilings", done=0, total=3),
    Step(name="ceilings", done=1, total=3, line="read 4000 GB/s"),
    Step(name="mla bf16", done=1, total=3),
)


def test_each_part_of_a_benchmark_is_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal a part prints one line, at its end."""
    with bench_progress() as on_step:
        for step in STEPS:
            on_step(step)

    assert capsys.readouterr() == ("", "read 4000 GB/s\n")


def test_a_terminal_shows_the_measured_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar counts parts and names the current one."""
    screen = terminal_of(monkeypatch)

    with bench_progress() as on_step:
        for step in STEPS:
            on_step(step)

    shown = screen.getvalue()
    assert "read 4000 GB/s" in shown
    assert "1/3" in shown
    assert "measuring mla bf16" in shown
