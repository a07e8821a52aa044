"""Unusable cache folders: a kernel is returned for any settings."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlagen.cache.store import kernel_store
from mlagen.settings import current_settings
from tests.cache import builds
from tests.cache.builds import CountedBuild, entry_path, make_build, make_key, tree
from tests.faults.privileges import give_up_capabilities
from tests.faults.steps import KEY, ask, store_in, warnings_in, whole_entries
from tests.fixture_types import Log, Patch

OTHER = make_key("another kernel")


def lock_up(folder: Path) -> None:
    """Make everything below a folder read-only."""
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def test_a_read_only_cache_serves_hits_and_builds_in_memory(tmp_path: Path) -> None:
    """Existing kernels are found, missing ones are built once per process, and nothing changes."""
    ask(tmp_path)
    lock_up(tmp_path / "cache")
    before = tree(tmp_path)

    def work() -> None:
        give_up_capabilities()
        store, build = store_in(tmp_path), CountedBuild()
        hit = store.find_or_build(KEY, build)
        misses = [store.find_or_build(OTHER, build) for _ in range(2)]
        assert hit.path == entry_path(tmp_path, KEY)
        assert [entry.path for entry in misses] == [None, None]
        assert build.calls == 1

    assert builds.in_child(work) == 0
    assert tree(tmp_path) == before


def settle(monkeypatch: Patch, temporary: Path, **environ: str) -> None:
    """Set only the variables of the cache folder; ``temporary`` is for temporary files."""
    for name in ("MLAGEN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.chdir(temporary)
    current_settings.cache_clear()


LOCKED: dict[str, Callable[[Path], dict[str, str]]] = {
    "a home that does not exist": lambda locked: {"HOME": f"{locked}/missing"},
    "a home that cannot be written": lambda locked: {"HOME": f"{locked}"},
    "a home that is a file": lambda locked: {"HOME": f"{locked}/file"},
    "an XDG folder that cannot be written": lambda locked: {"XDG_CACHE_HOME": f"{locked}/x"},
    "a relative XDG folder, and no home": lambda _: {"XDG_CACHE_HOME": "x", "HOME": ""},
    "a relative home": lambda _: {"HOME": "home"},
    "no home": lambda _: {},
    "a cache folder that cannot be written": lambda locked: {"MLAGEN_CACHE_DIR": f"{locked}/c"},
    "a relative cache folder": lambda _: {"MLAGEN_CACHE_DIR": "c"},
    "a cache folder that is a file": lambda locked: {"MLAGEN_CACHE_DIR": f"{locked}/file"},
    "a cache folder below a file": lambda locked: {"MLAGEN_CACHE_DIR": f"{locked}/file/c"},
    "a cache folder below a link to itself": lambda locked: {
        "MLAGEN_CACHE_DIR": f"{locked}/loop/c"
    },
    "a cache folder with a name too long": lambda locked: {
        "MLAGEN_CACHE_DIR": f"{locked}/{'c' * 300}"
    },
}


@pytest.mark.parametrize("place", LOCKED.values(), ids=LOCKED)
def test_a_place_that_cannot_be_written_costs_no_kernel(
    place: Callable[[Path], dict[str, str]], tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """Kernels are built and stored in memory, with one warning."""
    locked = tmp_path / "locked"
    locked.mkdir()
    (locked / "file").touch()
    (locked / "loop").symlink_to("loop")
    locked.chmod(0o555)
    before = tree(locked)
    settle(monkeypatch, locked, **place(locked))

    def work() -> None:
        give_up_capabilities()
        store, build = kernel_store(), CountedBuild()
        entries = [store.find_or_build(key, build) for key in (KEY, KEY, OTHER)]
        assert store.root.is_relative_to(locked)
        assert {entry.cubin for entry in entries} == {builds.CUBIN}
        assert [entry.path for entry in entries] == [None] * 3
        assert build.calls == 2
        (warning,) = warnings_in(caplog)
        assert warning.startswith("cache: expected a usable folder, got ")
        assert warning.endswith(f": {store.root}")

    assert builds.in_child(work) == 0
    assert tree(locked) == before


FREE: dict[str, Callable[[Path], dict[str, str]]] = {
    "no home": lambda _: {},
    "an empty home": lambda _: {"HOME": ""},
    "a relative home": lambda _: {"HOME": "home"},
    "a home that is yet to be made": lambda free: {"HOME": f"{free}/a/b/c"},
    "a name with a line end": lambda free: {"MLAGEN_CACHE_DIR": f"{free}/one\ntwo"},
    "a name that is not UTF-8": lambda free: {"MLAGEN_CACHE_DIR": f"{free}/\udcff"},
    "a name with colons, quotes and spaces": lambda free: {"MLAGEN_CACHE_DIR": f"{free}/:'\" "},
    "a link to a folder": lambda free: {"MLAGEN_CACHE_DIR": f"{free}/link"},
}


@pytest.mark.parametrize("place", FREE.values(), ids=FREE)
def test_an_odd_but_writable_folder_is_used(
    place: Callable[[Path], dict[str, str]], tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """Neither an unknown user nor an odd name matters."""
    free = tmp_path / "free"
    (free / "target").mkdir(parents=True)
    (free / "link").symlink_to("target")
    settle(monkeypatch, free, **place(free))

    def unknown_user(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(pwd, "getpwuid", unknown_user)
    store = kernel_store()

    entry = store.find_or_build(KEY, make_build)

    assert store.root.is_relative_to(free)
    assert entry.path is not None
    assert entry.path.is_relative_to(store.root)
    assert store.find(KEY) == entry
    assert warnings_in(caplog) == []


NAME = f"{KEY.digest}.{KEY.toolchain}"
SPOTS = {
    "the cache": "cache",
    "the layout": "cache/v2",
    "the first digits of the key": f"cache/v2/{KEY.digest[:2]}",
    "the entry": f"cache/v2/{KEY.digest[:2]}/{NAME}",
    "the tag": "cache/v2/CACHEDIR.TAG",
    "the folder of locks": "locks",
    "the lock": f"locks/{NAME}.lock",
}
KINDS: dict[str, Callable[[Path], object]] = {
    "a file": Path.touch,
    "a FIFO": os.mkfifo,
    "a folder": lambda path: (path / "inside").mkdir(parents=True),
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.timeout(15)
@pytest.mark.parametrize("spot", SPOTS.values(), ids=SPOTS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_obstacle_costs_no_kernel(
    kind: Callable[[Path], object], spot: str, tmp_path: Path, caplog: Log
) -> None:
    """For any obstacle in the cache folder, the kernel is returned without blocking."""
    (tmp_path / spot).parent.mkdir(parents=True, exist_ok=True)
    kind(tmp_path / spot)
    store, build = store_in(tmp_path), CountedBuild()

    entries = [store.find_or_build(KEY, build) for _ in range(2)]

    assert [entry.cubin for entry in entries] == [builds.CUBIN] * 2
    assert build.calls == 1
    assert len(warnings_in(caplog)) <= 1
    if entries[0].path is None:
        assert warnings_in(caplog) != []
        assert store_in(tmp_path).find(KEY) is None
    else:
        assert entries[0].path == entry_path(tmp_path, KEY)
        assert store_in(tmp_path).find(KEY) == entries[0]


def test_a_cache_that_is_deleted_in_use_is_recreated(tmp_path: Path) -> None:
    """A store whose folder is deleted builds and publishes as if it were new."""
    store = store_in(tmp_path)
    store.find_or_build(KEY, make_build)
    shutil.rmtree(tmp_path / "cache")
    entry = store.find_or_build(KEY, make_build)
    assert entry.path == entry_path(tmp_path, KEY)
    assert whole_entries(tmp_path) == 1


def test_a_folder_that_vanishes_while_publishing_is_recreated(
    tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """Another program may delete the cache under a builder."""
    link, vanished = os.link, list[str]()

    def vanish_first(name: str, new: str, **options: Any) -> None:
        if len(vanished) < 3:
            shutil.rmtree(tmp_path / "cache")
            vanished.append(name)
        link(name, new, **options)

    monkeypatch.setattr(os, "link", vanish_first)

    entry = store_in(tmp_path).find_or_build(KEY, make_build)

    assert len(vanished) == 3
    assert entry.path == entry_path(tmp_path, KEY)
    assert warnings_in(caplog) == []
