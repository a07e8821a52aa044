"""MLAGEN_RECORD: one complete line per kernel, and never a blocked call."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.engine import find_or_build, key_of
from mlagen.recording import record
from mlagen.settings import current_settings
from mlagen.spec.text import parse_spec
from tests.cache.builds import together
from tests.kernels import COMBINE


def start_record(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Set MLAGEN_RECORD for this test."""
    monkeypatch.setenv("MLAGEN_RECORD", str(path))
    current_settings.cache_clear()


def test_a_run_is_recorded_kernel_by_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each line has the kernel as text that prewarming reads, its key, compiler and outcome."""
    start_record(monkeypatch, tmp_path / "run.jsonl")
    find_or_build(COMBINE)
    find_or_build(COMBINE)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    key = key_of(COMBINE)
    kernel = {"kernel": str(COMBINE), "key": key.digest, "toolchain": key.toolchain}
    assert lines == [{**kernel, "found": "built"}, {**kernel, "found": "hit"}]
    assert parse_spec(lines[0]["kernel"]) == COMBINE


def test_concurrent_lines_stay_complete(tmp_path: Path) -> None:
    """Eight threads that append over their own descriptors write only complete lines."""
    path = tmp_path / "run.jsonl"
    line = {"kernel": "k" * 300, "key": "0" * 64, "toolchain": "nvrtc-1", "found": "hit"}

    def record_fifty() -> None:
        for _ in range(50):
            record(path, **line)

    together([record_fifty] * 8)
    assert [json.loads(text) for text in path.read_text().splitlines()] == [line] * 400


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda path: path.parent.rmdir(), "No such file or directory"),
        (os.mkfifo, "a FIFO"),
        (Path.mkdir, "Is a directory"),
        (lambda path: path.symlink_to("/dev/full"), "a device"),
    ],
    ids=["no folder", "a FIFO", "a folder", "a device"],
)
def test_a_record_that_is_no_regular_file_warns_once(
    make: Callable[[Path], object],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No call waits for a reader, and another reason causes no second warning."""
    path = tmp_path / "record/run.jsonl"
    path.parent.mkdir()
    make(path)
    start_record(monkeypatch, path)

    found = [find_or_build(COMBINE).built, find_or_build(COMBINE).built]
    if path.exists():
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(path)
    find_or_build(COMBINE)

    assert found == [True, False]
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.startswith(f"MLAGEN_RECORD: expected a file that can be written, got {kind}")
