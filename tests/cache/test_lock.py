"""One compile a kernel: the lock, exclusive where possible, and single flight of threads."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import pytest

from mlagen.cache import lock as lock_module
from mlagen.cache.lock import SingleFlight, compile_lock
from tests.cache.builds import failing, in_child
from tests.faults.privileges import give_up_capabilities
from tests.fixture_types import Log, Patch


@pytest.fixture(autouse=True)
def messages(caplog: Log) -> Log:
    """Record log messages from INFO on."""
    caplog.set_level(logging.INFO, logger="mlagen")
    return caplog


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    """Eight threads with separate lock objects never hold the lock together."""
    inside, most, counting = 0, 0, threading.Lock()

    def enter(_: int) -> None:
        nonlocal inside, most
        with compile_lock(tmp_path / "locks/a.lock", timeout_s=15):
            with counting:
                inside += 1
                most = max(most, inside)
            threading.Event().wait(0.01)
            with counting:
                inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(enter, range(8)))

    assert most == 1


def test_timeout_continues_without_the_lock(
    tmp_path: Path, messages: Log, monkeypatch: Patch
) -> None:
    """A waiting process logs repeatedly, and compiles after the timeout."""
    monkeypatch.setattr(lock_module, "_PROGRESS_S", 0.05)
    path = tmp_path / "a.lock"
    with filelock.FileLock(path), compile_lock(path, timeout_s=0.3):
        lines = [record.message for record in messages.records]
    assert lines[-1] == f"lock: expected within 0.3 s, got none, compiling without: {path}"
    assert len(lines) > 2
    waiting = f"waiting 0 s for another process to compile: {path}"
    assert set(lines[:-1]) == {waiting}


def test_timeout_of_zero_tries_once(tmp_path: Path) -> None:
    """A timeout of zero still takes a free lock."""
    path = tmp_path / "a.lock"
    with compile_lock(path, timeout_s=0), pytest.raises(filelock.Timeout):
        filelock.FileLock(path).acquire(timeout=0)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)),
        OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)),
        PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
        RuntimeError("forked in the middle"),
        NotImplementedError("no flock here"),
    ],
    ids=repr,
)
def test_broken_locks_are_skipped(
    error: Exception, tmp_path: Path, messages: Log, monkeypatch: Patch
) -> None:
    """Any locking error is logged in one line, and the work continues without the lock."""

    def reject(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", reject)
    with compile_lock(tmp_path / "a.lock", timeout_s=1):
        lines = [record.message for record in messages.records]
    assert lines == [
        f"lock: expected to work, got {error}, compiling without: {tmp_path / 'a.lock'}"
    ]


def test_a_file_system_without_locks_gets_no_substitute(
    tmp_path: Path, messages: Log, monkeypatch: Patch
) -> None:
    """A file whose existence is the lock would outlive a process that dies."""
    (tmp_path / "a.lock").touch()
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOSYS))
    with compile_lock(tmp_path / "a.lock", timeout_s=0.5):
        (line,) = [record.message for record in messages.records]
    assert line.startswith("lock: expected to work, got ")


@pytest.mark.parametrize("mode", [0o500, 0o600, 0o000], ids=oct)
def test_unusable_lock_folder_costs_one_warning(mode: int, tmp_path: Path, messages: Log) -> None:
    """A lock folder without permission is reported once."""
    (tmp_path / "locks").mkdir(mode=mode)

    def work() -> None:
        give_up_capabilities()
        for name in ("a", "b"):
            with compile_lock(tmp_path / f"locks/{name}.lock", timeout_s=1):
                pass
        (record,) = messages.records
        assert record.levelno == logging.WARNING
        assert "got Permission denied, compiling without" in record.message

    assert in_child(work) == 0


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    """A link at the path of a lock file creates nothing at its target."""
    (tmp_path / "a.lock").symlink_to(tmp_path / "target")
    with compile_lock(tmp_path / "a.lock", timeout_s=1):
        assert not (tmp_path / "target").exists()


def test_an_error_inside_frees_the_lock(tmp_path: Path) -> None:
    """A failed compile releases the lock."""
    path = tmp_path / "a.lock"
    with pytest.raises(LookupError), compile_lock(path, timeout_s=1):
        raise LookupError
    with filelock.FileLock(path, timeout=0) as held:
        assert held.is_locked


def test_lock_file_stays(tmp_path: Path) -> None:
    """The file is never deleted, so that all processes wait for the same file."""
    path = tmp_path / "locks/a.lock"
    with compile_lock(path, timeout_s=1):
        inode = path.stat().st_ino
    with compile_lock(path, timeout_s=1):
        pass
    assert path.stat().st_ino == inode


def test_other_keys_do_not_wait() -> None:
    """A call for another key runs concurrently."""
    flights = SingleFlight[str]()
    result = flights.run("one", lambda: flights.run("two", lambda: "inner"))
    assert result == "inner"


def test_nothing_is_kept_after_a_flight() -> None:
    """A second call works again: results are not cached."""
    flights, calls = SingleFlight[None](), []
    for _ in range(2):
        flights.run("key", lambda: calls.append(1))
    assert len(calls) == 2


def test_a_forked_child_does_not_wait_for_its_parent() -> None:
    """A child forked during a flight works by itself."""
    flights, inside, release = SingleFlight[str](), threading.Event(), threading.Event()

    def work() -> str:
        inside.set()
        release.wait(10)
        return "parent"

    with ThreadPoolExecutor(1) as pool:
        flight = pool.submit(flights.run, "key", work)
        inside.wait(10)
        status = in_child(lambda: flights.run("key", lambda: "child"))
        release.set()

    assert status == 0
    assert flight.result() == "parent"


def test_work_that_requests_its_own_key_raises() -> None:
    """Work that requests its own key raises instead of deadlocking."""
    flights = SingleFlight[object]()
    with pytest.raises(RuntimeError, match="kernel key: expected no request while building it"):
        flights.run("key", lambda: flights.run("key", object))
    assert flights.run("key", lambda: 1) == 1
