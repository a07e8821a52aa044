"""Paths of entries, and abandoned staging folders."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mlagen.cache.layout import Layout, is_abandoned
from tests.cache.builds import in_child
from tests.fixture_types import Patch

HOST = os.uname().nodename


@pytest.mark.parametrize("toolchain", ["", "..", "a/b", "a b", ".hidden"])
def test_a_toolchain_that_is_not_a_folder_name_is_rejected(toolchain: str) -> None:
    """No toolchain escapes the folder of its key."""
    with pytest.raises(AssertionError):
        Layout(Path("/cache")).entry("ab" * 32, toolchain)


@pytest.fixture(scope="module")
def dead_pid() -> int:
    """Return the id of a dead process."""
    reader, writer = os.pipe()
    in_child(lambda: os.write(writer, str(os.getpid()).encode()))
    return int(os.read(reader, 100))


@pytest.mark.parametrize("stem", ["ab" * 32, "trash"], ids=["staging", "trash"])
@pytest.mark.parametrize(
    ("host", "alive", "age_s", "expected"),
    [
        pytest.param(HOST, False, 4000, True, id="old and its process is gone"),
        pytest.param(HOST, True, 4000, False, id="old but its process runs"),
        pytest.param(HOST, False, 60, False, id="young"),
        pytest.param("node.example.org", True, 4000, True, id="old and of another host"),
        pytest.param("node.example.org", True, 60, False, id="young and of another host"),
        pytest.param(HOST, False, -90_000, True, id="from a clock that was set back"),
    ],
)
def test_is_abandoned(
    stem: str, host: str, alive: bool, age_s: int, expected: bool, dead_pid: int
) -> None:
    """Staging is abandoned after an hour, unless its process runs on this host."""
    name = f"{stem}.{host}.{os.getpid() if alive else dead_pid}.0a1b2c3d"
    assert is_abandoned(name, time.time() - age_s) is expected


@pytest.mark.parametrize("name", ["stray", "a.b", f"ab.{HOST}.not_a_number.00"])
def test_an_old_stray_name_is_abandoned(name: str) -> None:
    """A foreign name has no owner process."""
    assert is_abandoned(name, 0)


def test_a_process_of_another_user_counts_as_running(monkeypatch: Patch) -> None:
    """A permission error of the signal proves that the process exists."""

    def rejected(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", rejected)
    assert not is_abandoned(f"ab.{HOST}.1.00", 0)
