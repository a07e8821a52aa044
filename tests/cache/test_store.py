"""The kernel store: look up, build once, list and delete, also when the system returns errors."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlagen.cache import quarantine
from mlagen.cache.store import KernelStore
from mlagen.errors import ArgumentError, CacheError
from tests.cache import builds
from tests.cache.builds import (
    CountedBuild,
    entry_folder,
    failing,
    make_build,
    make_key,
    make_store,
    tree,
)
from tests.faults.steps import warnings_in
from tests.fixture_types import Log, Patch

KEY = make_key()


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    """Return a store whose folder does not exist yet."""
    return make_store(tmp_path)


def test_constructing_a_store_touches_nothing(store: KernelStore, tmp_path: Path) -> None:
    """Construction, look-ups and listings create no folder."""
    assert store.find(KEY) is None
    assert list(store.entries()) == store.select("abcdef") == []
    assert store.clear() == store.sweep() == 0
    assert tree(tmp_path) == []


def test_first_call_builds_and_later_ones_find(store: KernelStore, tmp_path: Path) -> None:
    """The entry of the builder equals the one that this and another store find afterwards."""
    build = CountedBuild()
    built = store.find_or_build(KEY, build)
    found = store.find_or_build(KEY, build)
    assert build.calls == 1
    assert found == built == make_store(tmp_path).find(KEY)
    assert built.path == entry_folder(tmp_path, KEY)
    assert built.cubin == builds.CUBIN
    assert built.manifest.created_by == "jit"


def test_the_compiler_that_ran_names_the_entry(store: KernelStore, caplog: Log) -> None:
    """If it differs from the key, the log names it and the entry has its name."""
    caplog.set_level(logging.INFO, logger="mlagen")
    entry = store.find_or_build(KEY, lambda: make_build(toolchain="nvrtc-13.5.40"))
    assert entry.manifest.toolchain == "nvrtc-13.5.40"
    assert store.find(KEY) is None
    assert store.find(make_key(toolchain="nvrtc-13.5.40")) == entry
    assert caplog.messages == [
        f"toolchain: expected {builds.TOOLCHAIN}, got nvrtc-13.5.40, publishing under the latter"
    ]


READ_ONLY_HIT = """
import os, sys
from pathlib import Path
from tests.cache.builds import make_key, make_store
effects = []
def watch(event, arguments):
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        effects.append(arguments)
    if event in {"os.mkdir", "os.rename", "os.remove", "os.utime", "os.chmod", "fcntl.flock"}:
        effects.append(event)
store, key = make_store(Path(sys.argv[1])), make_key()
sys.addaudithook(watch)
assert store.find(key) and store.find_or_build(key, None)
assert store.find(make_key("another")) is None
assert len(list(store.entries())) == 1 and store.verify(store.select(key.digest)[0]) is None
assert effects == [], effects
assert "filelock" not in sys.modules
"""


def test_reading_writes_nothing_and_takes_no_lock(store: KernelStore, tmp_path: Path) -> None:
    """Hits, misses and listings open files for reading only, and do not import filelock."""
    store.find_or_build(KEY, make_build)
    before = tree(tmp_path)
    command = [sys.executable, "-B", "-c", READ_ONLY_HIT, str(tmp_path)]
    run = subprocess.run(command, cwd=builds.ROOT, check=False, capture_output=True, text=True)
    assert run.stderr == ""
    assert tree(tmp_path) == before


@pytest.mark.parametrize("prefix", ["", "abcde", "ABCDEF", "abcdeg", "../../", "a" * 65])
def test_select_rejects_an_invalid_prefix(prefix: str, store: KernelStore) -> None:
    """A prefix of fewer than 6 or more than 64 digits, or with other characters, is rejected."""
    with pytest.raises(ArgumentError) as caught:
        store.select(prefix)
    assert str(caught.value) == f"key: expected 6 to 64 lower-case hex digits, got {prefix!r}"


def test_remove_deletes_one_entry(store: KernelStore, tmp_path: Path) -> None:
    """The entry is deleted with the folder of its key; a second removal does nothing."""
    entry = store.find_or_build(KEY, make_build)
    other = store.find_or_build(make_key("another"), make_build)
    (stored,) = store.select(KEY.digest)

    store.remove(stored)
    store.remove(stored)

    assert store.find(KEY) is None
    assert entry.cubin == builds.CUBIN
    assert store.find(make_key("another")) == other
    assert not entry_folder(tmp_path, KEY).parent.exists()
    assert tree(tmp_path / "cache/v1/staging") == []


def test_remove_keeps_the_other_toolchains(store: KernelStore) -> None:
    """Of two toolchains, one entry is deleted and the other is still found."""
    other = make_key(toolchain="nvrtc-12.8.1")
    store.find_or_build(KEY, make_build)
    store.find_or_build(other, lambda: make_build(toolchain="nvrtc-12.8.1"))
    store.remove(store.select(KEY.digest)[0])
    assert store.find(other) is None
    assert store.find(KEY) is not None


def test_clear_deletes_entries_and_quarantine(store: KernelStore, tmp_path: Path) -> None:
    """All entries are deleted, damaged or not, and the store still works."""
    for name in ("one", "two", "three"):
        store.find_or_build(make_key(name), make_build)
    store.quarantine(next(store.entries()), "a reason")
    (next(store.entries()).path / "manifest.json").write_bytes(b"garbage")
    count = store.clear()
    assert count == 2
    assert tree(tmp_path / "cache/v1") == ["CACHEDIR.TAG", "staging"]
    assert store.find_or_build(KEY, make_build).path is not None


def test_facts_that_are_not_json_are_an_internal_error(store: KernelStore) -> None:
    """A manifest that cannot be read back is not written."""
    build = replace(make_build(), facts={"path": object()})
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.find_or_build(KEY, lambda: build)
    assert list(store.entries()) == []


def test_processes_that_cannot_publish_do_not_wait_for_each_other(
    store: KernelStore, tmp_path: Path
) -> None:
    """If no entry can be published, the lock would only serialize the builds."""
    (tmp_path / "cache").touch()
    store.find_or_build(KEY, make_build)
    assert not (tmp_path / "locks").exists()


def test_sweep_that_fails_does_not_undo_publishing(
    store: KernelStore, monkeypatch: Patch, caplog: Log
) -> None:
    """An unreadable staging folder does not undo the publication."""
    monkeypatch.setattr(quarantine, "sweep", failing(errno.EACCES))
    entry = store.find_or_build(KEY, make_build)
    assert entry.path is not None
    assert warnings_in(caplog) == []
    with pytest.raises(CacheError, match="got Permission denied"):
        store.sweep()


@pytest.mark.parametrize("verb", ["remove", "quarantine", "clear"])
def test_an_entry_that_cannot_be_moved_is_a_cache_error(
    verb: str, store: KernelStore, monkeypatch: Patch
) -> None:
    """The error names the path, and the entry stays."""
    store.find_or_build(KEY, make_build)
    (stored,) = store.entries()
    verbs: dict[str, Callable[[], object]] = {
        "remove": lambda: store.remove(stored),
        "quarantine": lambda: store.quarantine(stored, "a reason"),
        "clear": store.clear,
    }

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing(errno.EROFS))
        with pytest.raises(CacheError, match="got Read-only file system: ") as caught:
            verbs[verb]()

    assert caught.value.path in {stored.path, *stored.path.parents}
    assert store.find(KEY) is not None
