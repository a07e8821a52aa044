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
from mlagen.cache.layout import Layout
from tests.cache import builds
from tests.cache.builds import CountedBuild, entry_folder, make_key, tree
from tests.faults.steps import KEY, ask, store_in, warnings_in, watch, whole_entries
from tests.fixture_types import Log, Patch

OTHER, LATER = make_key("another kernel"), make_key("a later kernel")


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
    staging = folder / "cache/v1/staging"
    for staged in staging.iterdir():
        os.utime(staged, (0, 0))
    ask(folder, LATER)
    return tree(staging)


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
        assert entry.path == entry_folder(folder, KEY)
        assert remaining + build.calls == 1
        assert whole_entries(folder) == len(others) + 1
        assert remains_later(folder) == []
        assert not (folder / "cache/v1/quarantine").exists()
        found.append(remaining == 1)

    # Before the rename nothing is visible, after it the whole entry.
    assert found == sorted(found)
    assert set(found) == {False, True}
    assert len(found) > 30


def remove(folder: Path) -> None:
    """Remove the entries of ``KEY``."""
    store = store_in(folder)
    for stored in store.select(KEY.digest):
        store.remove(stored)


def evict(folder: Path) -> None:
    """Evict everything."""
    for manifest in (folder / "cache").rglob("manifest.json"):
        os.utime(manifest, (0, 0))
    store_in(folder, max_bytes=1).collect()


def clear(folder: Path) -> None:
    """Delete everything."""
    store_in(folder).clear()


def is_in_place(folder: Path) -> bool:
    """Whether the entry of ``KEY`` is in place; a partial entry is an error."""
    path = entry_folder(folder, KEY)
    if path.exists():
        builds.read_at(path, key=KEY.digest, toolchain=KEY.toolchain)
    return path.exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("act", [remove, evict, clear], ids=lambda act: act.__name__)
def test_killed_at_any_moment_of_a_removal_a_process_leaves_nothing_or_everything(
    act: Callable[[Path], None], tmp_path: Path
) -> None:
    """An entry that is being removed is complete until it is gone, and the trash is swept."""
    ask(tmp_path / "valid")
    ask(tmp_path / "valid", OTHER)
    found = []
    for folder in crashes(tmp_path / "valid", act):
        whole_entries(folder)
        found.append(is_in_place(folder))
        assert ask(folder).path == entry_folder(folder, KEY)
        assert remains_later(folder) == []
    assert found == sorted(found, reverse=True)
    assert set(found) == {True, False}


@pytest.mark.timeout(60)
def test_killed_at_any_moment_of_a_quarantine_a_process_serves_no_damage(
    tmp_path: Path, caplog: Log
) -> None:
    """A damaged entry is in place or in the quarantine; either way the kernel is right."""
    ask(tmp_path / "damaged")
    (entry_folder(tmp_path / "damaged", KEY) / "kernel.cubin").write_bytes(b"\x7fELF damaged")
    moved = []
    for folder in crashes(tmp_path / "damaged", lambda folder: store_in(folder).look_up(KEY)):
        moved.append(not entry_folder(folder, KEY).exists())
        caplog.clear()

        entry = ask(folder)

        assert entry.cubin == builds.CUBIN
        assert entry.path == entry_folder(folder, KEY)
        assert len(warnings_in(caplog)) == (0 if moved[-1] else 1)
        assert whole_entries(folder) == 1

    assert moved == sorted(moved)
    assert set(moved) == {False, True}


def test_a_sweep_deletes_all_of_a_staging_folder_or_nothing(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """A builder whose staging is swept because of a wrong clock publishes all of it or nothing."""
    layout = Layout(tmp_path / "cache")
    staged = layout.staging / f"{KEY.digest}.elsewhere.1.00"
    staged.mkdir(parents=True)
    (staged / "kernel.cubin").write_bytes(builds.CUBIN)
    os.utime(staged, (0, 0))
    published = layout.entry(KEY.digest, KEY.toolchain)
    published.parent.mkdir(parents=True)
    unlink = os.unlink

    def publish_first(*args: object, **kwargs: object) -> None:
        if staged.exists():
            staged.rename(published)
        unlink(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "unlink", publish_first)

    swept = store_in(tmp_path).sweep()

    assert swept == 1
    assert tree(layout.staging) == []
    assert not published.exists()


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
    assert entry.path == entry_folder(tmp_path, KEY)
    assert caplog.messages == []
