"""What a process tells: metrics, log lines by MLAGEN_LOG, and the kernels of MLAGEN_RECORD."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import mlagen
from mlagen import monitoring
from mlagen.engine import find_or_build, key_of
from mlagen.monitoring import count, metrics
from mlagen.recording import record
from mlagen.settings import current_settings
from mlagen.spec.text import parse_spec
from tests.cache.builds import ROOT, in_child, together
from tests.faults.strangers import STRANGER, give_away
from tests.fixture_types import Patch
from tests.kernels import COMBINE

# argv: when the application configures its logging
PROGRAM = """
import logging, sys
if sys.argv[1] == "before":
    logging.basicConfig(format="app: %(message)s")
from mlagen.settings import current_settings
current_settings()
logger = logging.getLogger("mlagen")
logger.warning("first")
if sys.argv[1] == "after":
    logging.basicConfig(format="app: %(message)s")
for level in ("debug", "info", "warning"):
    getattr(logger, level)(level)
"""


def test_metrics_are_integers_with_fixed_names() -> None:
    """Every name is present from the start, and every value is an integer."""
    before = metrics()
    count("compile_ms", 12.4)
    assert {type(value) for value in metrics().values()} == {int}
    assert metrics().keys() == before.keys()
    # 12.4 more, on top of an earlier fraction of a millisecond.
    assert metrics()["compile_ms"] - before["compile_ms"] in (12, 13)
    assert mlagen.metrics() == metrics()


def test_an_unknown_metric_is_an_error() -> None:
    """Only declared metrics can be counted."""
    with pytest.raises(KeyError):
        count("coffee")


def test_threads_lose_no_increment() -> None:
    """Eight threads that add a thousand each add eight thousand."""
    before = metrics()["waits"]

    def count_a_thousand(_: int) -> None:
        for _ in range(1000):
            count("waits")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count_a_thousand, range(8)))
    assert metrics()["waits"] - before == 8000


def test_a_forked_child_counts_on() -> None:
    """A child starts with the parent's values, and waits for no lock of the parent."""
    before = metrics()["waits"]

    def work() -> None:
        count("waits")
        assert metrics()["waits"] == before + 1

    with monitoring._counting:
        status = in_child(work)

    assert status == 0
    assert metrics()["waits"] == before


def written(level: str | None, configured: str = "never") -> list[str]:
    """Return the log lines of a process, without times and process ids."""
    environ = {name: value for name, value in os.environ.items() if name != "MLAGEN_LOG"}
    environ |= {} if level is None else {"MLAGEN_LOG": level}
    command = [sys.executable, "-c", PROGRAM, configured]
    done = subprocess.run(
        command, env=environ, cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout == ""
    return [
        re.sub(r"^[\d-]+ [\d:,]+ ([A-Z]+) mlagen\[\d+\]: ", r"\1 ", line)
        for line in done.stderr.splitlines()
    ]


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        (None, ["first", "warning"]),
        ("", ["first", "warning"]),
        ("off", []),
        ("warn", ["WARNING first", "WARNING warning"]),
        ("info", ["WARNING first", "INFO info", "WARNING warning"]),
        ("debug", ["WARNING first", "DEBUG debug", "INFO info", "WARNING warning"]),
        ("api", ["WARNING first", "INFO info", "WARNING warning"]),
    ],
)
def test_a_level_sets_the_output(level: str | None, lines: list[str]) -> None:
    """Unset, Python prints warnings; otherwise lines start with time, level and process id."""
    assert written(level) == lines


@pytest.mark.parametrize(
    ("configured", "lines"),
    [
        ("before", ["app: first", "app: info", "app: warning"]),
        ("after", ["WARNING first", "app: info", "app: warning"]),
    ],
)
def test_an_application_that_configures_logging_gets_each_line_once(
    configured: str, lines: list[str]
) -> None:
    """The order of configuration and first call does not matter; the level applies."""
    assert written("info", configured) == lines


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
    line: dict[str, Any] = {
        "kernel": "k" * 300,
        "key": "0" * 64,
        "toolchain": "nvrtc-1",
        "found": "hit",
    }

    def record_fifty() -> None:
        for _ in range(50):
            record(path, **line)

    together([record_fifty] * 8)
    assert [json.loads(text) for text in path.read_text().splitlines()] == [line] * 400


def give_file_away(path: Path, patch: Patch) -> None:
    """Make an empty file of another user."""
    path.touch()
    give_away(path, patch)


def open_file(path: Path, _patch: Patch) -> None:
    """Make an empty file that others may write."""
    path.touch()
    path.chmod(0o666)


def give_folder_away(path: Path, patch: Patch, mode: int = 0o755) -> None:
    """Give the folder to another user."""
    path.parent.chmod(mode)
    give_away(path.parent, patch)


def link_to_own(path: Path, _patch: Patch, folder: str) -> None:
    """Link to a file of this user in another folder."""
    other = path.parents[1] / folder
    other.mkdir()
    (other / "victim").touch()
    path.symlink_to(other / "victim")


def link_of_another(path: Path, patch: Patch) -> None:
    """Make a link of another user to a file of this one, as in a folder such as /tmp."""
    link_to_own(path, patch, "own")
    path.parent.chmod(0o1777)
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1, follow_symlinks=False)
    else:
        give_away(path, patch)


def link_into_a_folder_of_all(path: Path, patch: Patch) -> None:
    """Make a link of this user to a file in a folder where all may write."""
    link_to_own(path, patch, "all")
    path.resolve().parent.chmod(0o777)


def open_to_another_group(path: Path, patch: Patch) -> None:
    """Let a group that is not the one of this process write in the folder."""
    path.parent.chmod(0o770)
    patch.setattr(os, "getegid", lambda: STRANGER)


STRANGERS: dict[str, Callable[[Path, Patch], object]] = {
    "a folder of all": lambda path, _: path.parent.chmod(0o777),
    "a folder of another group": open_to_another_group,
    "another's folder": give_folder_away,
    "another's folder like /tmp": lambda path, patch: give_folder_away(path, patch, 0o1777),
    "another's link": link_of_another,
    "a link into a folder of all": link_into_a_folder_of_all,
    "a file of all": open_file,
    "another's file": give_file_away,
}


@pytest.mark.parametrize("spoil", STRANGERS.values(), ids=STRANGERS)
def test_a_record_that_others_can_change_is_not_written(
    spoil: Callable[[Path, Patch], object],
    monkeypatch: Patch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is one warning, unless others are trusted."""
    path = tmp_path / "record/run.jsonl"
    path.parent.mkdir()
    spoil(path, monkeypatch)
    line: dict[str, Any] = {"kernel": "k", "key": "0" * 64, "toolchain": "nvrtc-1", "found": "hit"}

    for _ in range(2):
        record(path, **line)
    is_empty = not path.exists() or not path.read_text()
    record(path, **line, is_shared=True)

    assert is_empty
    assert path.read_text()
    (warning,) = caplog.messages
    assert warning.startswith("MLAGEN_RECORD: expected a file that can be written, got ")
    assert "MLAGEN_TRUST_SHARED=1" in warning


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o1777], ids=oct)
@pytest.mark.parametrize("is_link", [False, True], ids=["file", "link"])
def test_a_record_is_written_where_others_cannot_replace_it(
    mode: int, is_link: bool, tmp_path: Path
) -> None:
    """So it is in a folder such as /tmp, in one of the user's own group, and by the user's link."""
    path = tmp_path / "record/run.jsonl"
    path.parent.mkdir()
    path.parent.chmod(mode)
    if is_link:
        path.symlink_to(tmp_path / "elsewhere")
    record(path, kernel="k", key="0" * 64, toolchain="nvrtc-1", found="hit")
    assert json.loads(path.read_text())["kernel"] == "k"


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
