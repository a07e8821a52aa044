"""The kernel store: look up, build once, list, verify and delete, also when the system fails."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlagen.cache.bundle import export_bundle
from mlagen.cache.folder import Opened
from mlagen.cache.key import CacheKey
from mlagen.cache.store import KernelStore, UnreadableError, read_stored, verify
from mlagen.errors import ArgumentError, CacheError
from tests.cache import builds
from tests.cache.builds import (
    TOOLCHAIN,
    CountedBuild,
    cut,
    entry_path,
    failing,
    make_build,
    make_key,
    make_store,
    tree,
)
from tests.cache_tools.altered import snapshot
from tests.faults.steps import warnings_in
from tests.fixture_types import Log, Patch

KEY = make_key()
KEYS = [make_key(f"family {number}") for number in range(5)]


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    """Return a store whose folder does not exist yet."""
    return make_store(tmp_path)


@pytest.fixture
def filled(store: KernelStore) -> KernelStore:
    """Return a store with five entries."""
    for key in KEYS:
        store.find_or_build(key, make_build)
    return store


def test_constructing_a_store_touches_nothing(store: KernelStore, tmp_path: Path) -> None:
    """Construction, look-ups and listings create no folder."""
    assert store.find(KEY) is None
    assert list(store.entries()) == store.select("abcdef") == []
    assert store.sweep(dry_run=True) == []
    assert store.sweep() == []
    assert store.clear() == store.remove_old_layouts() == 0
    assert tree(tmp_path) == []


def test_first_call_builds_and_later_ones_find(store: KernelStore, tmp_path: Path) -> None:
    """The entry of the builder equals the one that this and another store find afterwards."""
    build = CountedBuild()
    built = store.find_or_build(KEY, build)
    found = store.find_or_build(KEY, build)
    assert build.calls == 1
    assert found == built == make_store(tmp_path).find(KEY)
    assert built.path == entry_path(tmp_path, KEY)
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
from mlagen.cache.store import verify
from tests.cache.builds import make_key, make_store
effects = []
def watch(event, arguments):
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        effects.append(arguments)
    if event in {"os.mkdir", "os.link", "os.rename", "os.remove", "os.utime", "fcntl.flock"}:
        effects.append(event)
store, key = make_store(Path(sys.argv[1])), make_key()
sys.addaudithook(watch)
assert store.find(key) and store.find_or_build(key, None)
assert store.find(make_key("another")) is None
assert len(list(store.entries())) == 1 and verify(store.select(key.digest)[0]) is None
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


CALLS = ("open", "read", "fstat", "stat", "lstat", "scandir", "listdir", "utime", "close", "access")


def test_a_hit_takes_a_few_accesses(store: KernelStore, monkeypatch: Patch) -> None:
    """Two opens, with their checks, one read of the whole file; a server does this per kernel."""
    store.find_or_build(KEY, make_build)
    store.find(KEY)
    calls: list[str] = []

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def access(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return call(*args, **kwargs)

        return access

    for name in CALLS:
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    assert store.find(KEY) is not None
    expected = ["fstat", "open", "fstat", "open", "fstat", "read", "close", "close"]
    assert calls == expected


@pytest.mark.parametrize("prefix", ["", "abcde", "ABCDEF", "abcdeg", "../../", "a" * 65])
def test_select_rejects_an_invalid_prefix(prefix: str, store: KernelStore) -> None:
    """A prefix of fewer than 6 or more than 64 digits, or with other characters, is rejected."""
    with pytest.raises(ArgumentError) as caught:
        store.select(prefix)
    assert str(caught.value) == f"key: expected 6 to 64 lower-case hex digits, got {prefix!r}"


def test_remove_deletes_one_entry(filled: KernelStore, tmp_path: Path) -> None:
    """The other entries, and those of other toolchains, stay; a second removal does nothing."""
    other = make_key("family 0", toolchain="nvrtc-12.8.1")
    filled.find_or_build(other, lambda: make_build(toolchain="nvrtc-12.8.1"))
    stored = next(one for one in filled.select(KEYS[0].digest) if one.toolchain == TOOLCHAIN)

    assert [filled.remove(stored), filled.remove(stored)] == [True, False]

    assert filled.find(KEYS[0]) is None
    assert filled.find(other) is not None
    assert all(filled.find(key) for key in KEYS[1:])
    assert tree(entry_path(tmp_path, KEYS[0]).parent) == [entry_path(tmp_path, other).name]


def test_clear_deletes_all_entries(filled: KernelStore, tmp_path: Path) -> None:
    """All entries are deleted, damaged or not, and the store still works."""
    cut(entry_path(tmp_path, KEYS[0]))
    part = entry_path(tmp_path, KEYS[1]).with_name(f".{'a' * 16}.part")
    part.touch()
    os.utime(part, (0, 0))
    assert filled.clear() == len(KEYS)
    assert [name for name in tree(tmp_path / "cache/v2") if len(name) > 2] == ["CACHEDIR.TAG"]
    assert filled.find_or_build(KEY, make_build).path is not None


def test_clear_deletes_the_rest_of_what_it_cannot_delete(
    filled: KernelStore, tmp_path: Path
) -> None:
    """A folder in the place of an entry is the error, and stays."""
    path = entry_path(tmp_path, KEYS[0])
    path.unlink()
    (path / "inside").mkdir(parents=True)
    with pytest.raises(CacheError, match="directory") as caught:
        filled.clear()
    assert caught.value.path == path
    assert [stored.path for stored in filled.entries()] == [path]


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
    """An unreadable folder does not undo the publication."""
    monkeypatch.setattr(Opened, "sweep", failing(errno.EACCES))
    entry = store.find_or_build(KEY, make_build)
    assert entry.path is not None
    assert warnings_in(caplog) == []
    with pytest.raises(CacheError, match="got Permission denied"):
        store.sweep()


@pytest.mark.parametrize("verb", ["remove", "clear"])
def test_an_entry_that_cannot_be_deleted_is_a_cache_error(
    verb: str, filled: KernelStore, monkeypatch: Patch
) -> None:
    """The error names the path, and the entry stays."""
    stored = next(iter(filled.entries()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing(errno.EROFS))
        with pytest.raises(CacheError, match="got Read-only file system: ") as caught:
            filled.remove(stored) if verb == "remove" else filled.clear()
    assert caught.value.path == stored.path
    assert len(list(filled.entries())) == len(KEYS)


def test_entries_come_in_the_order_of_their_keys(filled: KernelStore, tmp_path: Path) -> None:
    """Each entry is listed once, with its manifest, its file and its size."""
    listed = list(filled.entries())
    assert [stored.key for stored in listed] == sorted(key.digest for key in KEYS)
    for key in KEYS:
        stored = next(stored for stored in listed if stored.key == key.digest)
        path = entry_path(tmp_path, key)
        assert (stored.path, stored.toolchain, stored.problem) == (path, TOOLCHAIN, None)
        assert stored.manifest is not None
        assert stored.manifest.key_fields == key.key_fields
        assert stored.size_bytes == path.stat().st_size
        assert [one.key for one in filled.select(key.digest[:6])] == [key.digest]


def test_damaged_entries_are_listed_with_their_problem(filled: KernelStore, tmp_path: Path) -> None:
    """An entry without a valid manifest has a problem instead, and does not stop the listing."""
    first, second, third, fourth, _ = (entry_path(tmp_path, key) for key in KEYS)
    first.write_bytes(b"garbage")
    second.unlink()
    os.mkfifo(second)
    cut(third, third.stat().st_size - 1)
    fourth.write_bytes(entry_path(tmp_path, KEYS[4]).read_bytes())

    problems = {stored.path: stored.problem for stored in filled.entries()}

    assert len(problems) == len(KEYS)
    assert problems[first] == "expected the file of an entry, got one that begins b'garbage'"
    assert problems[second] == "expected a regular file, got another kind"
    assert f"got {third.stat().st_size}" in str(problems[third])
    assert f"expected that of {fourth.name}" in str(problems[fourth])
    assert list(problems.values()).count(None) == 1


def test_strays_are_no_entries(filled: KernelStore, tmp_path: Path) -> None:
    """Files and folders whose names are not of an entry are skipped."""
    version = tmp_path / "cache/v2"
    (version / "ab").mkdir(exist_ok=True)
    for name in (".DS_Store", "cd", "ab/notes.txt", f"ab/{'ab' * 32}", f"ab/{'ab' * 32}.a b"):
        (version / name).touch()
    assert len(list(filled.entries())) == len(KEYS)
    assert filled.clear() == len(KEYS)
    assert (version / "ab/notes.txt").exists()


def test_folder_that_cannot_be_read_is_a_cache_error(
    filled: KernelStore, monkeypatch: Patch, tmp_path: Path
) -> None:
    """An incomplete listing is an error that names the folder."""
    monkeypatch.setattr(os, "listdir", failing(errno.EACCES))
    with pytest.raises(CacheError, match="readable folder, got Permission denied") as caught:
        list(filled.entries())
    assert caught.value.path in {tmp_path / "cache", tmp_path / "cache/v2"}


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE], ids=errno.errorcode.__getitem__)
def test_an_entry_that_cannot_be_read_is_not_damaged(
    code: int, filled: KernelStore, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Listing, verification and export say so, and it keeps its last use."""
    (before,) = filled.select(KEYS[0].digest)
    path, opened = entry_path(tmp_path, KEYS[0]), os.open

    def reject(name: str, *args: int, **kwargs: int) -> int:
        if name == path.name:
            raise OSError(code, os.strerror(code))
        return opened(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", reject)
    (stored,) = filled.select(KEYS[0].digest)

    text = f"expected a readable entry, got {os.strerror(code)}"
    assert (stored.problem, stored.is_damaged) == (text, False)
    assert (stored.used, stored.size_bytes) == (before.used, before.size_bytes)
    target = tmp_path / "kernels.tar.gz"
    for read in (verify, read_stored, lambda stored: export_bundle([stored], target)):
        with pytest.raises(UnreadableError, match=f"^cache: {text}: {path}$"):
            read(stored)
    assert not target.exists()


def test_verify_of_a_removed_entry_raises(filled: KernelStore, tmp_path: Path) -> None:
    """An entry removed since listing is neither valid nor damaged."""
    stored = next(iter(filled.entries()))
    stored.path.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        verify(stored)


NEWEST, OLD = "nvrtc-13.5.37", "nvrtc-13.0.88"
ANY = make_key(toolchain="nvrtc-13")


def put(folder: Path, toolchain: str) -> Path:
    """Publish a kernel of a toolchain, last used long ago, in a cache folder; return its file."""
    key = make_key(toolchain=toolchain)
    path = make_store(folder).find_or_build(key, lambda: make_build(toolchain=toolchain)).path
    assert path is not None
    os.utime(path, (1, 1))
    return path


def store_over(folder: Path) -> KernelStore:
    """Return a store of ``folder/own`` above ``folder/layer``."""
    own, layers = folder / "own/cache", [folder / "layer/cache"]
    return KernelStore(own, lock_dir=folder / "locks", lock_timeout_s=60, layers=layers)


def become_a_folder(entry: Path) -> None:
    """Replace an entry by a folder."""
    entry.unlink()
    entry.mkdir()


# Setup of an entry, requested toolchain, and expected problem.
STATES: dict[str, tuple[str, Callable[[Path], object], CacheKey, str | None]] = {
    "valid": (NEWEST, lambda _: None, make_key(), None),
    "valid, any of a major version": (OLD, lambda _: None, ANY, None),
    "another compiler": (OLD, lambda _: None, make_key(), None),
    "another key": (NEWEST, lambda _: None, make_key("combine"), None),
    "cut off": (NEWEST, cut, make_key(), "manifest: expected the content of its digest"),
    "others may write": (NEWEST, lambda path: path.chmod(0o666), make_key(), "mode 0666, which"),
    "a folder": (NEWEST, become_a_folder, make_key(), "expected a regular file, got another kind"),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("place", ["own", "layer"])
def test_a_dry_look_up_has_the_result_of_a_normal_one(
    state: str, place: str, tmp_path: Path, caplog: Log
) -> None:
    """Nothing is deleted, marked or logged."""
    toolchain, change, key, problem = STATES[state]
    change(put(tmp_path / place, toolchain))
    before = snapshot(tmp_path)

    dry = store_over(tmp_path).look_up(key, is_dry=True)
    after, warnings = snapshot(tmp_path), warnings_in(caplog)
    called = store_over(tmp_path).look_up(key)

    assert after == before
    assert warnings == []
    assert dry == called
    assert (problem or "") in (dry.problem or "")
    assert (dry.problem is None) == (problem is None)


def test_the_problem_belongs_to_the_reason(tmp_path: Path) -> None:
    """With one damaged and one untrusted entry, the damage is the reason."""
    cut(put(tmp_path / "own", NEWEST))
    put(tmp_path / "layer", NEWEST).chmod(0o666)
    found = store_over(tmp_path).look_up(make_key(), is_dry=True)
    assert found.reason == "damaged"
    assert str(found.problem).startswith("manifest: expected the content of its digest")
