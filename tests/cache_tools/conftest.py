"""Fixtures: the command in this process or its own, and a small cache."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest
from click.testing import CliRunner, Result

import mlagen
from cache_tools.cli import cli
from mlagen.prewarming import PrewarmReport

ROOT = Path(__file__).resolve().parents[2]


class Run(Protocol):
    """Run the command with these arguments."""

    def __call__(self, *arguments: str, answer: str | None = None) -> Result:
        """Return its exit code, stdout and stderr; ``answer`` is the input on stdin."""


class Start(Protocol):
    """Start the command in its own process."""

    def __call__(self, *arguments: str, without: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """Return the process; the packages in ``without`` cannot be imported in it."""


@pytest.fixture
def run() -> Run:
    """Return a function that runs the command in this process."""
    # Before click 8.2 the two streams are merged by default; later they are always separate.
    is_old = "mix_stderr" in inspect.signature(CliRunner).parameters
    options: dict[str, Any] = {"mix_stderr": False} if is_old else {}
    runner = CliRunner(**options)

    def run_it(*arguments: str, answer: str | None = None) -> Result:
        result = runner.invoke(cli, arguments, input=answer, prog_name="mlagen")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run_it


@pytest.fixture
def start() -> Start:
    """Return a function that starts the command in its own process."""

    def start_it(*arguments: str, without: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        # A shell's background job ignores Ctrl-C, and its children inherit that.
        script = (
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
            f"import sys; sys.modules.update(dict.fromkeys({without}));"
            "from cache_tools.__main__ import main; main()"
        )
        return subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            cwd=ROOT,
            env=os.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start_it


@pytest.fixture
def cached() -> PrewarmReport:
    """Cache two kernels that compile in 0.1 s each."""
    return mlagen.prewarm("sm_80", families=["combine"], dtype="bf16", kv_lora_rank=[256, 512])


def damage(key: str, toolchain: str, cache_dir: Path) -> Path:
    """Flip a bit of a cached cubin and return its path."""
    path = cache_dir / "v1" / "e" / key[:2] / key / toolchain / "kernel.cubin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path
