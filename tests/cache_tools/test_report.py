"""Tables, facts and quantities; progress by lines, and on a terminal the current work."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from rich.console import Console

import mlagen
from cache_tools.benchmark.outcomes import Step
from cache_tools.output import progress, report
from cache_tools.output.progress import bench_progress, byte_progress, prewarm_progress
from cache_tools.output.report import (
    age_text,
    count_text,
    kernel_columns,
    print_facts,
    print_table,
    size_text,
    time_text,
)
from cache_tools.tools.interrupts import Interrupted
from mlagen.prewarming import PrewarmEvent, PrewarmUnit
from mlagen.spec.arch import parse_arch
from mlagen.spec.dtype import DType
from mlagen.spec.families import specs_of
from mlagen.spec.kernel import KernelSpec
from tests.fixture_types import Patch
from tests.kernels import gqa_sm90

Capsys = pytest.CaptureFixture[str]
SIZES = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 54_624: "53 KiB", 5 << 20: "5.0 MiB"}
TIMES = {0.0184: "18 us", 0.2: "200 us", 1.5: "1.5 ms", 612.3: "612 ms", 1432.0: "1.4 s"}
AGES = {-5: "0 s ago", 59: "59 s ago", 60: "1 min ago", 7200: "2 h ago", 34_560_000: "400 d ago"}


def test_quantities_are_human_readable() -> None:
    """Units keep quantities short, and the future counts as now."""
    assert {size: size_text(size) for size in SIZES} == SIZES
    assert {ms: time_text(ms) for ms in TIMES} == TIMES
    assert {age_s: age_text(age_s) for age_s in AGES} == AGES
    assert [count_text(count, "kernel") for count in (1, 2)] == ["1 kernel", "2 kernels"]
    assert count_text(0, "entry", "entries") == "0 entries"


def test_a_table_is_aligned_and_a_fact_unchanged(capsys: Capsys) -> None:
    """Numbers are right-aligned, None is empty or no column, a fact in a pipe is one plain line."""
    rows = [{"name": "a", "size": 1, "note": None}, {"name": "bcd", "size": 200, "note": "x"}]
    print_table([{**row, "variant": "", "error": None} for row in rows])
    assert capsys.readouterr().out == "name  size  note\na        1\nbcd    200  x\n"
    path = "/x/[bold]x[/bold]/:smile:" + "/long" * 100
    print_facts({"path": path})
    assert capsys.readouterr().out == f"path  {path}\n"


def test_a_narrow_terminal_folds_facts(capsys: Capsys, monkeypatch: Patch) -> None:
    """A long fact is broken at blanks, not at hyphens."""
    monkeypatch.setattr(report, "line_width", lambda: 29)
    fact = "the cache folder is a read-only layer of another user"
    print_facts({"why": fact})
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("why  the cache")
    assert all(line.startswith("     ") for line in rest)
    assert " ".join(" ".join([first, *rest]).split()) == f"why {fact}"


@pytest.mark.parametrize("family", ["mla_sm80", "gqa_sm80", "combine"])
def test_the_columns_of_a_kernel_are_unique(family: str) -> None:
    """No two supported kernels of an architecture have equal columns."""
    specs = specs_of(parse_arch("sm_90a"), [family])
    rows = {tuple(kernel_columns(family, spec.key_fields()).values()) for spec in specs}
    assert len(rows) == len(specs)


def test_the_columns_of_a_kernel_say_where_scales_of_tokens_are() -> None:
    """Beside the rows, or behind them."""
    specs = [
        gqa_sm90(kv_dtype=DType.INT8_PER_TOKEN_HEAD, has_unaligned_rows=is_unaligned)
        for is_unaligned in (False, True)
    ]
    columns = [kernel_columns(spec.family, spec.key_fields()) for spec in specs]
    assert [column["variant"] for column in columns] == ["", "scales in rows"]


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
SPILLS = unit(status="hit", ms=0.25, spill_bytes=8)
SLOW = unit(status="timeout", ms=2000.0, error=mlagen.CompileError("no", log="", source=""))


@pytest.mark.parametrize(
    ("reported", "line"),
    [
        (event("finished", unit()), f"built     88 ms  {DIMS} 512: 32 registers"),
        (event("finished", SPILLS), f"hit      250 us  {DIMS} 512: 32 registers, 8 bytes spilled"),
        (event("finished", FAILURE), f"failed    88 ms  {DIMS} 512: arch: no"),
        (event("loaded"), f"loaded           {DIMS} 512"),
    ],
    ids=["built", "found, with spills", "failed", "loaded"],
)
def test_each_kernel_is_one_plain_line(reported: PrewarmEvent, line: str, capsys: Capsys) -> None:
    """Without a terminal each event is printed once, and a compiled kernel is kept."""
    kept: set[KernelSpec] = set()
    with prewarm_progress(kept) as on_event:
        on_event(reported)
    assert capsys.readouterr() == ("", line + "\n")
    assert kept == ({FIRST} if line.startswith("built") else set())


def test_the_plan_is_one_line_before_the_first_kernel(capsys: Capsys) -> None:
    """It counts the kernels to compile and the cached ones."""
    with prewarm_progress(set()) as on_event:
        for spec in (FIRST, SECOND):
            on_event(event("missing", spec=spec, done=3))
        assert capsys.readouterr().err == ""
        for spec in (FIRST, SECOND):
            on_event(event("started", spec=spec, done=3))
    assert capsys.readouterr().err == "compiling 2 kernels, 3 cached\n"


@pytest.fixture
def screen(request: pytest.FixtureRequest, monkeypatch: Patch) -> io.StringIO | None:
    """Send progress to a terminal, and return its output, or None for a file."""
    if getattr(request, "param", "a terminal") == "a file":
        return None
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr(progress, "console", lambda **_: terminal)
    return screen


file_or_terminal = pytest.mark.parametrize("screen", ["a file", "a terminal"], indirect=True)


@file_or_terminal
def test_quiet_is_a_line_for_each_failure(screen: io.StringIO | None, capsys: Capsys) -> None:
    """A quiet run has no bar."""
    finished = [event("finished", each) for each in (unit(), SLOW)]
    with prewarm_progress(set(), is_quiet=True) as on_event:
        for each in (event("missing"), event("started"), *finished, event("loaded")):
            on_event(each)
    shown = capsys.readouterr().err if screen is None else screen.getvalue()
    assert shown == f"timeout   2.0 s  {DIMS} 512: no\n"


def test_a_terminal_shows_the_compiling_kernel(screen: io.StringIO) -> None:
    """The bar counts kernels, names the one that compiles the longest, and has a time left."""
    with prewarm_progress(set()) as on_event:
        for kind in ("missing", "started"):
            on_event(event(kind))
            on_event(event(kind, spec=SECOND))
        on_event(event("finished", unit(), done=1))
    for part in ("1/2", " left", f"compiling {DIMS} 256"):
        assert part in screen.getvalue()


STEPS = (
    Step(name="ceilings", done=0, total=3),
    Step(name="ceilings", done=1, total=3, line="read 4000 GB/s"),
    Step(name="mla bf16", done=1, total=3),
)


@file_or_terminal
def test_each_part_of_a_benchmark_is_one_line(screen: io.StringIO | None, capsys: Capsys) -> None:
    """It is printed at its end; a bar counts parts and names the current one, as an interrupt."""

    def measure() -> None:
        with bench_progress() as on_step:
            for step in STEPS:
                on_step(step)
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=r"^1 of 3 parts measured$"):
        measure()
    assert capsys.readouterr() == ("", "read 4000 GB/s\n" if screen is None else "")
    for part in ("read 4000 GB/s", "1/3", "measuring mla bf16"):
        assert screen is None or part in screen.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True], ids=["a file", "a terminal"])
def test_a_step_of_bytes_is_one_line_or_a_bar(is_terminal: bool, monkeypatch: Patch) -> None:
    """The bar shows the bytes done, the total and the step; an unknown total is no error."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with byte_progress("uploading to memory://x") as on_progress:
        on_progress(1 << 19, 0)
        on_progress(1 << 20, 2 << 20)
    shown = stream.getvalue()
    assert "1.0 MiB of 2.0 MiB" in shown if is_terminal else shown == "uploading to memory://x\n"
    assert "uploading to memory://x" in shown
