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
from tests.cache import builds
from tests.cache.builds import CountedBuild, entry_path, failing, make_build, make_store
from tests.faults.crowds import crowd, received, send
from tests.faults.steps import KEY, ask, parts, store_in, warnings_in, whole_entries
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
    target = entry_path(tmp_path, KEY)

    def remember_nothing(path: Path) -> None:
        if path == target:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    with before_reading(remember_nothing):
        built = [store.find_or_build(KEY, build) for _ in range(2)]
    later = store.find_or_build(KEY, build)

    assert build.calls == 2
    assert {entry.cubin for entry in [*built, later]} == {builds.CUBIN}
    assert {entry.path for entry in [*built, later]} == {entry_path(tmp_path, KEY)}
    assert whole_entries(tmp_path) == 1
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("has_links", [True, False], ids=["with links", "without links"])
def test_the_second_publisher_keeps_its_bytes_and_leaves_no_trace(
    has_links: bool, tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """The first entry stays."""
    target = entry_path(tmp_path, KEY)
    if not has_links:
        monkeypatch.setattr(os, "link", failing(errno.EPERM))

    def build() -> Build:
        rival = make_store(tmp_path / "rival")
        rival.find_or_build(KEY, lambda: make_build(OTHER_CUBIN))
        shutil.copytree(tmp_path / "rival/cache", tmp_path / "cache", dirs_exist_ok=True)
        return make_build()

    entry = store_in(tmp_path).find_or_build(KEY, build)

    assert (entry.cubin, entry.path) == (builds.CUBIN, target)
    assert ask(tmp_path).cubin == OTHER_CUBIN
    assert parts(tmp_path) == []
    assert warnings_in(caplog) == []


def test_a_link_whose_answer_was_lost_is_a_publication(
    tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """A retried call fails because the first one succeeded; the entry exists."""
    real = os.link

    def link_twice(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link_twice)
        entry = ask(tmp_path)

    assert entry.path == entry_path(tmp_path, KEY)
    assert whole_entries(tmp_path) == 1
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


def test_an_entry_that_is_removed_while_it_is_read_is_served(tmp_path: Path, caplog: Log) -> None:
    """One open file is the whole entry."""
    ask(tmp_path)
    path, real = entry_path(tmp_path, KEY), os.read

    def read(descriptor: int, size: int) -> bytes:
        path.unlink(missing_ok=True)
        return real(descriptor, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "read", read)
        found = store_in(tmp_path).find(KEY)

    assert found is not None
    assert found.cubin == builds.CUBIN
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("is_dry", [False, True], ids=["look-up", "dry look-up"])
def test_an_entry_removed_before_it_is_read_is_absent(
    is_dry: bool, tmp_path: Path, caplog: Log
) -> None:
    """A layer that another machine cleans up is not called damaged."""
    ask(tmp_path)
    path = entry_path(tmp_path, KEY)
    store = store_in(tmp_path / "above", layers=[tmp_path / "cache"])

    with before_reading(lambda read: path.unlink(missing_ok=True) if read == path else None):
        found = store.look_up(KEY, is_dry=is_dry)

    assert (found.entry, found.reason, found.problem) == (None, "absent", None)
    assert warnings_in(caplog) == []
