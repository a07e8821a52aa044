"""Planted files: links are not followed, and nothing is imported or executed."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.cache.layout import Layout
from mlagen.errors import CacheError
from tests.cache import builds
from tests.cache.builds import ROOT, CountedBuild, entry_folder, make_key, tree
from tests.faults.steps import KEY, ask, store_in, warnings_in, whole_entries
from tests.faults.strangers import STRANGER, folder_of
from tests.fixture_types import Log, Patch

OTHER = make_key("another kernel")
INSIDE = ["cache/v1", "cache/v1/e", "cache/v1/staging", "shard", "key", "entry"]
LED_HOME = ["cache/v1", "cache/v1/e", "cache/v1/staging", "cache/v1/quarantine"]


def test_a_root_behind_a_link_is_used(tmp_path: Path, caplog: Log) -> None:
    """A user may have moved the cache to another disk; the checks apply to the target."""
    (tmp_path / "other disk").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to("other disk")
    made = ask(tmp_path)
    found = store_in(tmp_path).find(KEY)
    assert made.path == entry_folder(tmp_path, KEY)
    assert found == made
    assert warnings_in(caplog) == []


def test_a_root_behind_a_link_passes_the_same_checks(tmp_path: Path, caplog: Log) -> None:
    """A link does not make an untrusted folder trusted."""
    (tmp_path / "all may write").mkdir()
    (tmp_path / "all may write").chmod(0o777)
    (tmp_path / "cache").symlink_to("all may write")
    entry = ask(tmp_path)
    assert entry.path is None
    assert tree(tmp_path / "all may write") == []
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("folder", INSIDE)
def test_a_link_inside_the_cache_is_not_followed(folder: str, tmp_path: Path, caplog: Log) -> None:
    """A valid entry behind it is not loaded, nothing is written there, and nothing is deleted."""
    ask(tmp_path)
    place = folder_of(tmp_path, folder)
    target = tmp_path / "elsewhere"
    place.rename(target)
    place.symlink_to(target)
    before = tree(target)
    store, build = store_in(tmp_path), CountedBuild()

    entries = [store.find_or_build(KEY, build) for _ in range(2)]

    assert {entry.cubin for entry in entries} == {builds.CUBIN}
    assert build.calls == 1
    assert tree(target) == before
    assert len(warnings_in(caplog)) == 1
    if folder == "entry":  # the only folder that can be quarantined
        assert entries[1].path == entry_folder(tmp_path, KEY)
        assert whole_entries(tmp_path) == 1
    else:
        assert "a symbolic link at " in warnings_in(caplog)[0]
        assert store.look_up(KEY).layer is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two other users")
@pytest.mark.parametrize(
    ("place", "is_shared"),
    # With trusted users, they may choose the root.
    [("cache", False), *itertools.product(LED_HOME, [False, True])],
)
def test_a_cache_created_by_another_user_deletes_nothing(place: str, is_shared: bool) -> None:
    """A link from a well-known folder to the home of the user is not followed."""
    with tempfile.TemporaryDirectory() as name:
        folder, user = Path(name), 1
        folder.chmod(0o755)
        home = folder / "home"
        for inside in ("photos/one", "e/photos/one", "staging/photos/one", "v1/staging/one/two"):
            (home / inside).mkdir(parents=True)
        for path in (home, *home.rglob("*")):
            os.chown(path, user, user)
            os.utime(path, (0, 0))
        link = folder / place
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(home)
        for path in folder.rglob("*"):
            if not path.is_relative_to(home):
                os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
        before = tree(home)

        def work() -> None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            store = store_in(folder, is_shared=is_shared, max_bytes=1)
            assert store.find_or_build(KEY, builds.make_build).cubin == builds.CUBIN
            for verb in (store.collect, store.clear, store.sweep):
                with pytest.raises(CacheError, match="expected a trusted folder, got a "):
                    verb()

        assert builds.in_child(work) == 0
        assert tree(home) == before


@pytest.mark.parametrize("what", ["a link to a file", "a link to a folder", "a folder", "a FIFO"])
def test_what_is_planted_at_a_staging_name_is_not_used(
    what: str, tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """Even for a known name, it is neither written through nor blocking."""
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0" * 8)
    place = Layout(tmp_path / "cache").new_staging(KEY.digest)
    place.parent.mkdir(parents=True)
    for folder in (tmp_path / "cache", tmp_path / "cache/v1", place.parent):
        folder.chmod(0o700)
    (tmp_path / "precious").mkdir()
    (tmp_path / "file").write_bytes(b"precious")
    plant: dict[str, Callable[[], None]] = {
        "a link to a file": lambda: place.symlink_to(tmp_path / "file"),
        "a link to a folder": lambda: place.symlink_to(tmp_path / "precious"),
        "a folder": place.mkdir,
        "a FIFO": lambda: os.mkfifo(place),
    }
    plant[what]()

    entry = ask(tmp_path)

    assert (entry.cubin, entry.path) == (builds.CUBIN, None)
    assert (tmp_path / "file").read_bytes() == b"precious"
    assert tree(tmp_path / "precious") == []
    assert os.path.lexists(place)
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("name", ["size.json", "CACHEDIR.TAG"])
def test_a_link_in_place_of_a_file_is_not_written_through(name: str, tmp_path: Path) -> None:
    """The target of the link is unchanged."""
    ask(tmp_path)
    note = tmp_path / "cache/v1" / name
    (tmp_path / "file").write_bytes(b"precious")
    note.unlink()
    note.symlink_to(tmp_path / "file")
    entry = ask(tmp_path, OTHER)
    assert entry.path == entry_folder(tmp_path, OTHER)
    assert (tmp_path / "file").read_bytes() == b"precious"


@pytest.mark.parametrize("verb", ["quarantine", "remove", "evict"])
def test_a_hard_link_to_another_file_is_not_changed(verb: str, tmp_path: Path) -> None:
    """Its content decides whether it is loaded; the other file keeps content and mode."""
    ask(tmp_path)
    cubin = entry_folder(tmp_path, KEY) / "kernel.cubin"
    other = tmp_path / "other.cubin"
    other.write_bytes(builds.CUBIN)
    other.chmod(0o640)
    cubin.unlink()
    cubin.hardlink_to(other)
    store = store_in(tmp_path, max_bytes=1)

    served = store.find(KEY)
    if verb == "quarantine":
        other.write_bytes(b"\x7fELF changed from outside")
        assert store.find(KEY) is None
    elif verb == "remove":
        store.remove(*store.entries())
    else:
        os.utime(cubin.parent / "manifest.json", (1, 1))
        assert len(store.collect().evicted) == 1

    assert served is not None
    assert whole_entries(tmp_path) == 0
    assert other.read_bytes()[:4] == b"\x7fELF"
    assert other.stat().st_mode & 0o777 == 0o640


def test_staging_names_cannot_be_guessed(tmp_path: Path) -> None:
    """Their last part has at least 32 random bits of the system, new each time."""
    layout = Layout(tmp_path)
    parts = [layout.new_staging("ab").name.rpartition(".")[2] for _ in range(1000)]
    assert all(re.fullmatch(r"[0-9a-f]{8,}", part) for part in parts)
    assert len(set(parts)) > 990
    assert len({part[-1] for part in parts}) == 16


# Runs in a fresh interpreter, on a cache full of files that Python might execute.
LOOK = """
import os, sys
from pathlib import Path
root = os.path.realpath(sys.argv[1])
from tests.cache.builds import make_key
from tests.faults.steps import store_in
EVENTS = ("import", "exec", "compile", "marshal.loads", "pickle.find_class", "ctypes.dlopen")
events = []
def watch(event, arguments):
    if event in EVENTS:
        events.append((event, str(arguments)))
import mlagen.cache.wheel, filelock
os.chdir(root + "/cache")
sys.addaudithook(watch)
store = store_in(Path(root))
assert store.find(make_key()) is not None
assert store.find(make_key("another kernel")) is None
(stored,) = [stored for stored in store.entries() if stored.problem is None]
assert store.verify(stored) is None
store.collect()
bad = [event for event in events if root in event[1] or event[0].startswith(("pickle", "marshal"))]
assert bad == [], bad
"""
TRAPS = ("__init__.py", "json.py", "sitecustomize.py", "conftest.py", "kernel.pkl", "kernel.so")


def test_nothing_of_the_cache_is_imported_unpickled_or_run(tmp_path: Path) -> None:
    """Python files, pickles and libraries beside the entries are ignored."""
    ask(tmp_path)
    folders = [tmp_path / "cache", *(p for p in (tmp_path / "cache").rglob("*") if p.is_dir())]
    for folder in folders:
        for name in TRAPS:
            (folder / name).write_text("raise SystemExit('run')\n")
    command = [sys.executable, "-c", LOOK, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
