"""Processes that die at any moment: no partial entry is visible, and nothing stays behind."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlagen.artifacts import Build
from mlagen.cache.key import CacheKey
from tests.cache import builds
from tests.cache.builds import CountedBuild, cut, entry_path, make_key
from tests.faults.steps import KEY, ask, parts, store_in, warnings_in, watch, whole_entries
from tests.fixture_types import Log

OTHER = make_key("another kernel")
# In the folder of the kernel that was not finished.
LATER = next(
    key
    for number in range(10**5)
    if (key := make_key(f"a later kernel {number}")).digest[:2] == KEY.digest[:2]
)


def crashes(folder: Path, work: Callable[[Path], object]) -> Iterator[Path]:
    """Run work on a copy of ``folder``; yield the disk as kill -9 before each step leaves it.

    A process of its own does the work, so that every remnant is of a dead process. The last disk is
    the one after all steps.
    """
    states = folder.with_name(f"{folder.name} killed")
    live = states / "live"
    folder.mkdir(exist_ok=True)
    shutil.copytree(folder, live)

    def work_watched() -> None:
        numbers, is_copying = itertools.count(), False

        def keep(_: str) -> None:
            nonlocal is_copying
            if not is_copying:
                is_copying = True
                shutil.copytree(live, states / f"{next(numbers)}")
                is_copying = False

        watch(pytest.MonkeyPatch(), before=keep)
        work(live)
        keep("end")

    assert builds.in_child(work_watched) == 0
    for number in range(len(list(states.iterdir())) - 1):
        yield states / f"{number}"


def remains_later(folder: Path) -> list[str]:
    """Publish another kernel as if hours had passed, and return what remains of dead processes."""
    for part in parts(folder):
        os.utime(part, (0, 0))
    ask(folder, LATER)
    return [part.name for part in parts(folder)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("others", [[], [OTHER]], ids=["no cache yet", "beside another"])
def test_killed_at_any_moment_of_a_build_a_process_leaves_nothing_or_everything(
    others: list[CacheKey], tmp_path: Path
) -> None:
    """After kill -9 around each step, other processes find a complete entry or build one."""
    found: list[bool] = []
    for other in others:
        ask(tmp_path / "before", other)
    for folder in crashes(tmp_path / "before", ask):
        build = CountedBuild()
        remaining = whole_entries(folder) - len(others)

        entry = ask(folder, build=build)

        assert entry.cubin == builds.CUBIN
        assert entry.path == entry_path(folder, KEY)
        assert remaining + build.calls == 1
        assert whole_entries(folder) == len(others) + 1
        assert remains_later(folder) == []
        found.append(remaining == 1)

    # Before the link nothing is visible, after it the whole entry.
    assert found == sorted(found)
    assert set(found) == {False, True}
    assert len(found) > 10


def remove(folder: Path) -> None:
    """Remove the entries of ``KEY``."""
    store = store_in(folder)
    for stored in store.select(KEY.digest):
        store.remove(stored)


def evict(folder: Path) -> None:
    """Evict everything."""
    for path in (folder / "cache").glob("v2/*/*"):
        os.utime(path, (0, 0))
    store_in(folder, max_bytes=1).collect()


def clear(folder: Path) -> None:
    """Delete everything."""
    store_in(folder).clear()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("act", [remove, evict, clear], ids=lambda act: act.__name__)
def test_killed_at_any_moment_of_a_removal_a_process_leaves_nothing_or_everything(
    act: Callable[[Path], None], tmp_path: Path
) -> None:
    """An entry is complete until it is gone."""
    ask(tmp_path / "valid")
    ask(tmp_path / "valid", OTHER)
    found = []
    for folder in crashes(tmp_path / "valid", act):
        whole_entries(folder)
        found.append(entry_path(folder, KEY).exists())
        assert ask(folder).path == entry_path(folder, KEY)
        assert remains_later(folder) == []

    assert found == sorted(found, reverse=True)
    assert set(found) == {True, False}


@pytest.mark.timeout(60)
def test_killed_at_any_moment_of_finding_damage_a_process_serves_none(
    tmp_path: Path, caplog: Log
) -> None:
    """A damaged entry is in place or gone; either way the kernel is right."""
    ask(tmp_path / "damaged")
    cut(entry_path(tmp_path / "damaged", KEY))
    gone = []
    for folder in crashes(tmp_path / "damaged", lambda folder: store_in(folder).look_up(KEY)):
        gone.append(not entry_path(folder, KEY).exists())
        caplog.clear()
        assert ask(folder).cubin == builds.CUBIN
        assert len(warnings_in(caplog)) == (not gone[-1])
        assert whole_entries(folder) == 1
    assert set(gone) == {False, True}


@pytest.mark.timeout(30)
def test_a_lock_is_free_when_its_holder_is_killed_though_its_child_lives(
    tmp_path: Path, caplog: Log
) -> None:
    """A child that was forked while its parent held the lock does not keep it locked."""
    reader, writer = os.pipe()

    def fork_and_hold() -> Build:
        if builds.fork() == 0:
            os.write(writer, b"%d" % os.getpid())
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # for both, so that neither outlives a failing test
        while True:
            signal.pause()

    holder = builds.fork()
    if holder == 0:
        try:
            ask(tmp_path, build=fork_and_hold)
        finally:
            os._exit(1)
    os.close(writer)
    child = int(os.read(reader, 100))
    os.kill(holder, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(holder, 0)[1]) == -signal.SIGKILL
    build = CountedBuild()
    try:
        entry = store_in(tmp_path, lock_timeout_s=10.0).find_or_build(KEY, build)
        os.kill(child, 0)  # it is alive
    finally:
        os.kill(child, signal.SIGKILL)

    assert build.calls == 1
    assert entry.path == entry_path(tmp_path, KEY)
    assert caplog.messages == []
