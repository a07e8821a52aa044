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

from mlagen.errors import CacheError
from tests.cache import builds
from tests.cache.builds import ROOT, CountedBuild, entry_path, make_key, tree
from tests.faults.steps import KEY, ask, parts, store_in, warnings_in, watch, whole_entries
from tests.faults.strangers import STRANGER, folder_of
from tests.fixture_types import Log, Patch

OTHER = make_key("another kernel")
SHARD = KEY.digest[:2]
INSIDE = ["cache/v2", "shard"]


def test_a_root_behind_a_link_is_used(tmp_path: Path, caplog: Log) -> None:
    """A user may have moved the cache to another disk; the checks apply to the target."""
    (tmp_path / "other disk").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to("other disk")
    made = ask(tmp_path)
    found = store_in(tmp_path).find(KEY)
    assert made.path == entry_path(tmp_path, KEY)
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
    assert "a symbolic link at " in warnings_in(caplog)[0]
    assert store.look_up(KEY).layer is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two other users")
@pytest.mark.parametrize(
    ("place", "is_shared"),
    # With trusted users, they may choose the root.
    [("cache", False), *itertools.product(INSIDE, [False, True])],
)
def test_a_cache_created_by_another_user_deletes_nothing(place: str, is_shared: bool) -> None:
    """A link from a well-known folder to the home of the user is not followed."""
    with tempfile.TemporaryDirectory() as name:
        folder, user = Path(name), 1
        folder.chmod(0o755)
        home = folder / "home"
        for inside in ("photos/one", f"{SHARD}/photos", f"v2/{SHARD}/photos"):
            (home / inside).mkdir(parents=True)
        for path in (home, *home.rglob("*")):
            os.chown(path, user, user)
            os.utime(path, (0, 0))
        link = folder / ("cache/v2" if place == "shard" else place)
        link = link / SHARD if place == "shard" else link
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
def test_what_is_planted_at_a_temporary_name_is_not_used(
    what: str, tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """Even for a known name, it is neither written through nor blocking."""
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0" * 16)
    place = entry_path(tmp_path, KEY).with_name(f".{'0' * 16}.part")
    for folder in (tmp_path / "cache", tmp_path / "cache/v2", place.parent):
        folder.mkdir(mode=0o700)
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


def test_a_link_in_place_of_the_tag_is_not_written_through(tmp_path: Path) -> None:
    """The target of the link is unchanged."""
    ask(tmp_path)
    tag = tmp_path / "cache/v2/CACHEDIR.TAG"
    (tmp_path / "file").write_bytes(b"precious")
    tag.unlink()
    tag.symlink_to(tmp_path / "file")
    assert ask(tmp_path, OTHER).path == entry_path(tmp_path, OTHER)
    assert (tmp_path / "file").read_bytes() == b"precious"


@pytest.mark.parametrize("verb", ["damage", "remove", "evict"])
def test_a_hard_link_to_another_file_is_not_changed(verb: str, tmp_path: Path) -> None:
    """Its content decides whether it is loaded; the other file keeps content and mode."""
    ask(tmp_path)
    path, other = entry_path(tmp_path, KEY), tmp_path / "other"
    other.write_bytes(path.read_bytes())
    other.chmod(0o640)
    path.unlink()
    path.hardlink_to(other)
    store = store_in(tmp_path, max_bytes=1)

    served = store.find(KEY)
    content = other.read_bytes()
    if verb == "damage":
        content = b"changed from outside"
        other.write_bytes(content)
        assert store.find(KEY) is None
    elif verb == "remove":
        store.remove(*store.entries())
    else:
        os.utime(path, (1, 1))
        assert len(store.collect().evicted) == 1

    assert served is not None
    assert whole_entries(tmp_path) == 0
    assert other.read_bytes() == content
    assert other.stat().st_mode & 0o777 == 0o640


def test_temporary_names_cannot_be_guessed(tmp_path: Path) -> None:
    """They have 64 random bits of the system, new each time."""
    names: list[str] = []

    def look(name: str) -> None:
        if name == "link":
            names.extend(part.name for part in parts(tmp_path))

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, before=look)
        for number in range(50):
            ask(tmp_path, make_key(f"family {number}"))
    assert all(re.fullmatch(r"\.[0-9a-f]{16}\.part", name) for name in names)
    assert len(set(names)) == 50
    assert len({name[-6] for name in names}) > 8


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
from mlagen.cache.store import verify
os.chdir(root + "/cache")
sys.addaudithook(watch)
store = store_in(Path(root))
assert store.find(make_key()) is not None
assert store.find(make_key("another kernel")) is None
(stored,) = [stored for stored in store.entries() if stored.problem is None]
assert verify(stored) is None
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
