"""Ends of `mlagen prewarm`: timeouts, failures of workers, and signals."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from mlagen.cache.default_store import kernel_store
from mlagen.prewarming import isolation
from mlagen.spec.kernel import KernelSpec

from .conftest import Run, Start
from .test_prewarm import SMALL


def replace_workers(monkeypatch: pytest.MonkeyPatch, *commands: list[str]) -> None:
    """Replace the worker processes by these, in order."""
    left = list(commands)

    def command(_spec: KernelSpec) -> list[str]:
        return left.pop(0)

    monkeypatch.setattr(isolation, "worker_command", command)


HANGS = ["sleep", "600"]
DIES = ["false"]


@pytest.mark.parametrize(
    ("commands", "timeout", "code", "counts"),
    [
        ((HANGS, HANGS), "0.1", 5, "0 built, 0 hit, 0 failed, 2 timeout"),
        ((DIES, HANGS), "2", 1, "0 built, 0 hit, 1 failed, 1 timeout"),
        ((DIES, DIES), "60", 1, "0 built, 0 hit, 2 failed"),
    ],
    ids=["timeouts", "one of each", "deaths"],
)
def test_timeouts_have_an_exit_code(
    commands: tuple[list[str], ...],
    timeout: str,
    code: int,
    counts: str,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Timeouts alone exit with 5; with other failures the code is 1."""
    replace_workers(monkeypatch, *commands)

    result = run(*SMALL, "--isolate", "--timeout", timeout, "-j", "2")

    assert result.exit_code == code
    assert result.stdout.startswith(f"2 kernels: {counts}, in ")


def test_the_first_failure_may_end_the_work(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --fail-fast, kernels that have not started are counted as skipped."""
    replace_workers(monkeypatch, DIES)

    result = run(*SMALL, "--isolate", "--fail-fast", "-j", "1")

    assert result.exit_code == 1
    assert result.stdout.startswith("2 kernels: 0 built, 0 hit, 1 failed, 1 skipped, in ")
    statuses = [line.split()[0] for line in result.stderr.splitlines()[1:]]
    assert statuses == ["failed", "skipped"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("isolate", [(), ("--isolate",)], ids=["threads", "processes"])
def test_a_signal_keeps_only_finished_kernels(
    number: signal.Signals, isolate: tuple[str, ...], start: Start, cache_dir: Path
) -> None:
    """It exits with 130; each entry is valid, and the staging folder empty."""
    arguments = ("prewarm", "--arch", "sm_80,sm_86,sm_90a", "--family", "combine,gqa_sm80")
    # Sequential: the first kernel is small, and many follow.
    kernels = ("--dtype", "bf16", "--page-size", "16", "-j", "1")
    process = start(*arguments, *kernels, *isolate)
    assert process.stderr is not None
    _plan, first = process.stderr.readline(), process.stderr.readline()

    process.send_signal(number)
    _, err = process.communicate(timeout=60)

    store = kernel_store()
    entries = list(store.entries())
    assert first.startswith("built ")
    assert process.returncode == 130
    noun = "kernel" if len(entries) == 1 else "kernels"
    assert err.splitlines()[-1] == f"mlagen: interrupted, {len(entries)} {noun} kept"
    assert entries
    assert [store.verify(entry) for entry in entries] == [None] * len(entries)
    assert list((cache_dir / "v1" / "staging").iterdir()) == []
