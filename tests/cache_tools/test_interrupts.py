"""Ctrl-C and SIGTERM at any moment, also repeated: one line, 130, and no leftovers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from cache_tools.commands import cache_lists, cache_transfers
from cache_tools.output.progress import byte_progress
from cache_tools.output.report import count_text
from cache_tools.tools import bundles
from mlagen.cache.store import kernel_store, verify
from tests.cache.bundle_cases import bundle_bytes, filled_store
from tests.fixture_types import Patch

from .conftest import ROOT, on_a_terminal, raising, run, start

BEGIN = (
    "from cache_tools.tools.interrupts import install_handlers;"
    "install_handlers(); print('begin', flush=True);"
)
OPTIONS = "--arch sm_80 --family combine,gqa_sm80 --dtype bf16 --page-size 16"
KERNELS = ("prewarm", *OPTIONS.split())


@pytest.mark.parametrize(
    ("isolate", "after_s"),
    [((), 0.0), ((), 0.4), (["--isolate"], 0.15), (["--isolate"], 0.8)],
    ids=["threads, at once", "threads, later", "processes, at once", "processes, later"],
)
def test_repeated_interrupts_count_as_one(
    after_s: float, isolate: Sequence[str], cache_dir: Path
) -> None:
    """Kept kernels are counted, and no traceback, process or temporary file remains."""
    process = start(*KERNELS, "-j", "2", *isolate, before=BEGIN, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(after_s)
    for _ in range(3):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.05)
    _, errors = process.communicate(timeout=60)

    entries = list(kernel_store().entries())
    assert (process.returncode, "Traceback" in errors) == (130, False), errors
    assert errors.count("interrupted") == 1
    match = re.fullmatch(r"mlagen: interrupted(?:, (\d+) kernels? kept)?", errors.splitlines()[-1])
    assert match is not None
    assert int(match[1] or 0) == len(entries)
    assert list(cache_dir.glob("v2/*/.*")) == []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            assert str(cache_dir).encode() not in (folder / "environ").read_bytes(), folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("isolate", [(), ("--isolate",)], ids=["threads", "processes"])
def test_a_signal_keeps_only_finished_kernels(
    number: signal.Signals, isolate: tuple[str, ...], cache_dir: Path
) -> None:
    """It exits with 130; each entry is valid, and nothing else remains."""
    # Sequential: the first kernel is small, and many follow.
    process = start(*KERNELS, "--arch", "sm_80,sm_86,sm_90a", "-j", "1", *isolate)
    assert process.stderr is not None
    _plan, first = process.stderr.readline(), process.stderr.readline()

    process.send_signal(number)
    _, err = process.communicate(timeout=60)

    entries = list(kernel_store().entries())
    assert first.startswith("built ")
    assert process.returncode == 130
    kept = count_text(len(entries), "kernel")
    assert err.splitlines()[-1] == f"mlagen: interrupted, {kept} kept"
    assert entries
    assert [verify(entry) for entry in entries] == [None] * len(entries)
    assert list(cache_dir.glob("v2/*/.*")) == []


# A line with what erases it, or one that is left and then erased; and the cursor's own sequences.
ERASED = re.compile(r"[^\n]*\n[^\n]*\x1b\[1A\x1b\[2K|[^\n]*\x1b\[2K|\x1b\[\?\d+[hl]")


def test_ctrl_c_clears_the_bar() -> None:
    """Only the finished kernels and the summary stay on the screen, each once."""
    text = "compiling gqa_sm80"
    code, output = on_a_terminal(*KERNELS, "-j", "1", interrupt_at=text, TERM="xterm")
    plan, *built, last = [line for line in ERASED.sub("", output).splitlines() if line.strip()]
    assert re.search(r"about \d+ (s|min) left", output)
    assert code == 130
    assert plan.startswith("compiling ")
    assert last == f"mlagen: interrupted, {count_text(len(built), 'kernel')} kept"
    assert {line.split()[0] for line in built} == {"built"}


@pytest.mark.parametrize(
    ("arguments", "module", "step", "summary"),
    [
        ("verify", cache_lists, "", "1 of 2 entries verified, 0 bad, none removed"),
        ("export k.tar.gz", cache_transfers, "", "k.tar.gz not written"),
        ("export . --wheel k", cache_transfers, "", "k not written"),
        ("push file://k.tar.gz", cache_transfers, "", "file://k.tar.gz not written"),
        ("pull there.tar.gz", cache_transfers, "", "nothing imported"),
        ("import there.tar.gz", bundles, "", "nothing imported"),
        ("import there.tar.gz", bundles, "publishing", "1 of 2 kernels kept"),
    ],
)
def test_an_interrupt_says_what_is_kept(
    arguments: str, module: ModuleType, step: str, summary: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The last line has it, no file is written, and what is published stays."""

    @contextlib.contextmanager
    def interrupted(doing: str) -> Iterator[Callable[[int, int], None]]:
        with byte_progress(doing) as on_progress:
            yield raising(KeyboardInterrupt()) if step in doing else on_progress

    place = tmp_path / "there" if step else tmp_path
    (tmp_path / "there.tar.gz").write_bytes(bundle_bytes(filled_store(place)))
    before = {*tmp_path.iterdir()}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "byte_progress", interrupted)

    result = run("cache", *arguments.split())

    made = {tmp_path / "cache", tmp_path / "locks"} if step else set()
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.splitlines()[-1] == f"mlagen: interrupted, {summary}"
    assert len(list(kernel_store().entries())) == (1 if step else 2)
    assert {*tmp_path.iterdir()} - before <= made


INTERRUPTED_ANYWHERE = """
import signal; signal.signal(signal.SIGINT, signal.default_int_handler)
from cache_tools.tools.interrupts import interruptible, install_handlers
import time

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

install_handlers()
try:
    with interruptible():
        Finalized()
        time.sleep(30)
except KeyboardInterrupt:
    signal.raise_signal(signal.SIGINT)
    print("once")
"""


def test_an_interrupt_dropped_in_a_finalizer_is_raised_again() -> None:
    """Python drops an exception in a finalizer; the work still ends, silently."""
    command = [sys.executable, "-c", INTERRUPTED_ANYWHERE]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "once\n", "")
