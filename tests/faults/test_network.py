"""Network file systems: delayed visibility, stale handles, lost answers, missing locks."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlagen.artifacts import Build
from mlagen.cache.eviction import evict
from mlagen.cache.layout import Layout
from tests.cache import builds
from tests.cache.builds import CountedBuild, entry_folder, failing, make_build, make_store, tree
from tests.faults.crowds import crowd, received, send
from tests.faults.steps import KEY, ask, store_in, warnings_in, whole_entries
from tests.fixture_types import Log, Patch

OTHER_CUBIN = builds.CUBIN + b"of another build"


@contextmanager
def before_reading(act: Callable[[Path], object]) -> Iterator[None]:
    """Call ``act`` with the path before each call that reads a file or a folder."""
    real_open, real_stat = os.open, os.stat

    def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if not flags & os.O_CREAT:
            act(builds.full_path(path, kwargs.get("dir_fd")))
        return real_open(path, flags, *args, **kwargs)

    def stat(path: Any, **kwargs: Any) -> os.stat_result:
        act(builds.full_path(path, kwargs.get("dir_fd")))
        return real_stat(path, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", open_)
        patch.setattr(os, "stat", stat)
        yield


def test_a_publication_that_is_not_seen_for_a_while_costs_no_kernel(
    tmp_path: Path, caplog: Log
) -> None:
    """A publisher that does not see its entry yet has its bytes, and builds again on request."""
    store, build = store_in(tmp_path), CountedBuild()
    entries = tmp_path / "cache/v1/e"

    def remember_nothing(path: Path) -> None:
        if path.is_relative_to(entries) and len(path.relative_to(entries).parts) > 2:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    with before_reading(remember_nothing):
        built = [store.find_or_build(KEY, build) for _ in range(2)]
    later = store.find_or_build(KEY, build)

    assert build.calls == 2
    assert {entry.cubin for entry in [*built, later]} == {builds.CUBIN}
    assert {entry.path for entry in [*built, later]} == {entry_folder(tmp_path, KEY)}
    assert whole_entries(tmp_path) == 1
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("code", [errno.EEXIST, errno.ENOTEMPTY], ids=errno.errorcode.__getitem__)
def test_the_second_publisher_keeps_its_bytes_and_leaves_no_trace(
    code: int, tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """For any error of the rename, the first entry stays."""
    target = entry_folder(tmp_path, KEY)
    real, rejected = os.rename, []

    def rename(path: str, new: str, **folders: int) -> None:
        if builds.full_path(new, folders.get("dst_dir_fd")) == target and target.exists():
            rejected.append(path)
            raise OSError(code, os.strerror(code))
        real(path, new, **folders)

    monkeypatch.setattr(os, "rename", rename)

    def build() -> Build:
        rival = make_store(tmp_path / "rival")
        rival.find_or_build(KEY, lambda: make_build(OTHER_CUBIN))
        shutil.copytree(entry_folder(tmp_path / "rival", KEY), target)
        return make_build()

    entry = store_in(tmp_path).find_or_build(KEY, build)

    assert len(rejected) == 1
    assert (entry.cubin, entry.path) == (builds.CUBIN, target)
    assert ask(tmp_path).cubin == OTHER_CUBIN
    assert tree(tmp_path / "cache/v1/staging") == []
    assert warnings_in(caplog) == []


def test_a_rename_whose_answer_was_lost_is_a_publication(
    tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """A retried rename fails because the first one succeeded; the entry exists."""
    real = os.rename

    def rename_twice(path: str, new: str, **folders: int) -> None:
        real(path, new, **folders)
        real(path, new, **folders)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename_twice)
        entry = ask(tmp_path)

    assert entry.path == entry_folder(tmp_path, KEY)
    assert whole_entries(tmp_path) == 1
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ENOTEMPTY], ids=errno.errorcode.__getitem__)
def test_files_that_others_have_open_delay_deletion_and_nothing_else(
    code: int, tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """Entries that a client keeps for open files are invisible at once, and swept later."""
    store = store_in(tmp_path)
    ask(tmp_path)
    (stored,) = store.entries()

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", failing(code))
        store.remove(stored)
        absent = store.find(KEY)
        entry = ask(tmp_path)
    staging = tmp_path / "cache/v1/staging"
    remaining = list(staging.iterdir())
    for trash in remaining:
        os.utime(trash, (0, 0))
        trash.rename(trash.with_name("trash.elsewhere.1.00"))
    store.sweep()

    assert absent is None
    assert entry.path == entry_folder(tmp_path, KEY)
    assert len(remaining) == 1
    assert tree(staging) == []
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(
    "code", [errno.ENOLCK, errno.ENOSYS, errno.EIO], ids=errno.errorcode.__getitem__
)
def test_a_lock_folder_without_locks_costs_builds_only(code: int, tmp_path: Path) -> None:
    """Four processes without locks all get the kernel, and there is one entry."""

    def build() -> Build:
        send(tmp_path, "built")
        return make_build()

    def work(_: int) -> None:
        fcntl.flock = failing(code)
        entry = ask(tmp_path, build=build)
        assert entry.cubin == builds.CUBIN
        assert entry.path is not None

    statuses = crowd(4, work)

    assert statuses == [0] * 4
    assert 1 <= len(received(tmp_path)) <= 4
    assert whole_entries(tmp_path) == 1


def _evict(folder: Path) -> None:
    os.utime(entry_folder(folder, KEY) / "manifest.json", (1, 1))
    assert len(evict(Layout(folder / "cache"), 1)) == 1


def _replace(folder: Path) -> None:
    _evict(folder)
    make_store(folder).find_or_build(KEY, lambda: make_build(OTHER_CUBIN))


@contextmanager
def _between(act: Callable[[Path], None], folder: Path) -> Iterator[None]:
    """Act once, between the reads of a manifest and of its cubin."""
    acts = [act]

    def read(path: Path) -> None:
        if path.name == "kernel.cubin" and acts:
            acts.pop()(folder)

    with before_reading(read):
        yield
    assert acts == []


@pytest.mark.parametrize("act", [_evict, _replace], ids=["removed", "replaced"])
def test_an_entry_removed_between_manifest_and_cubin_is_not_damaged(
    act: Callable[[Path], None], tmp_path: Path, caplog: Log
) -> None:
    """A concurrent reader gets a complete kernel, old or new, and quarantines nothing."""
    ask(tmp_path)

    with _between(act, tmp_path):
        entry = ask(tmp_path)

    assert entry.cubin == (builds.CUBIN if act is _evict else OTHER_CUBIN)
    assert entry.path == entry_folder(tmp_path, KEY)
    assert whole_entries(tmp_path) == 1
    assert tree(tmp_path / "cache/v1/quarantine") == []
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("is_dry", [False, True], ids=["look-up", "dry look-up"])
def test_an_entry_removed_from_a_layer_while_it_is_read_is_absent(
    is_dry: bool, tmp_path: Path, caplog: Log
) -> None:
    """A layer that another machine cleans up is not called damaged."""
    ask(tmp_path)
    store = store_in(tmp_path / "above", layers=[tmp_path / "cache"])

    with _between(_evict, tmp_path):
        found = store.look_up(KEY, is_dry=is_dry)

    assert (found.entry, found.reason, found.problem) == (None, "absent", None)
    assert warnings_in(caplog) == []
