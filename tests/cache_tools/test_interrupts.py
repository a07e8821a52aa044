"""Repeated Ctrl-C at any moment of a prewarm: one line, 130, and no leftovers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlagen.cache.default_store import kernel_store

from .conftest import ROOT

SCRIPT = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from cache_tools.interrupts import install_handlers;"
    "install_handlers(); print('begin', flush=True);"
    "from cache_tools.__main__ import main; main()"
)
KERNELS = (
    *("prewarm", "--arch", "sm_80", "--family", "combine,gqa_sm80"),
    *("--dtype", "bf16", "--page-size", "16", "-j", "2"),
)


def interrupt_often(after_s: float, *options: str) -> tuple[int, str]:
    """Start a prewarm, interrupt it three times, 50 ms apart; return its code and its stderr."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *KERNELS, *options],
        cwd=ROOT,
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(after_s)
    for _ in range(3):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.05)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def processes_of(cache_dir: Path) -> list[str]:
    """Return the ids of the processes that use this cache."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(cache_dir).encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
    return found


@pytest.mark.parametrize("isolate", [(), ("--isolate",)], ids=["threads", "processes"])
@pytest.mark.parametrize("after_s", [0.0, 0.15, 0.4, 0.8, 1.5])
def test_repeated_interrupts_count_as_one(
    after_s: float, isolate: tuple[str, ...], cache_dir: Path
) -> None:
    """Kept kernels are counted, and no traceback, process or staging folder remains."""
    code, errors = interrupt_often(after_s, *isolate)

    entries = list(kernel_store().entries())
    assert (code, "Traceback" in errors) == (130, False), errors
    assert errors.count("interrupted") == 1
    match = re.fullmatch(r"mlagen: interrupted(?:, (\d+) kernels? kept)?", errors.splitlines()[-1])
    assert match is not None
    assert int(match[1] or 0) == len(entries)
    assert list(cache_dir.glob("v1/staging/*")) == []
    assert processes_of(cache_dir) == []


INTERRUPTED_ANYWHERE = """
import signal; signal.signal(signal.SIGINT, signal.default_int_handler)
from cache_tools.interrupts import interruptible, install_handlers
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
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_ANYWHERE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "once\n", "")
