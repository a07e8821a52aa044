"""Ends of `mlagen prewarm`: timeouts, failures of workers, and signals."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from mlagen.cache.default_store import kernel_store
from mlagen.prewarming import isolation

from .conftest import Run, Start
from .test_prewarm import SMALL

HANGS, DIES = ["sleep", "600"], ["false"]


@pytest.mark.parametrize(
    ("commands", "options", "code", "counts"),
    [
        ((HANGS, HANGS), "--timeout 0.1 -j 2", 5, "0 failed, 2 timeout"),
        ((DIES, HANGS), "--timeout 2 -j 2", 1, "1 failed, 1 timeout"),
        ((DIES, DIES), "--timeout 60 -j 2", 1, "2 failed"),
        ((DIES,), "--fail-fast -j 1", 1, "1 failed, 1 skipped"),
    ],
    ids=["timeouts", "one of each", "deaths", "the first failure"],
)
def test_timeouts_have_an_exit_code(
    commands: tuple[list[str], ...],
    options: str,
    code: int,
    counts: str,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Timeouts alone exit with 5; kernels that --fail-fast never starts are skipped."""
    left = iter(commands)
    monkeypatch.setattr(isolation, "worker_command", lambda _spec: next(left))

    result = run(*SMALL, "--isolate", *options.split())

    _plan, *lines = result.stderr.splitlines()
    assert result.exit_code == code
    assert result.stdout.startswith(f"2 kernels: 0 built, 0 hit, {counts}, in ")
    for count, status in (part.split() for part in counts.split(", ")):
        assert sum(line.startswith(f"{status} ") for line in lines) == int(count)


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
