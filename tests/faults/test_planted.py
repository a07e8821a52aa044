"""What others could plant in a cache: links are not followed, and nothing is imported or run."""

from __future__ import annotations

import ast
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

OTHER = make_key("another kernel")
INSIDE = ["cache/v1", "cache/v1/e", "cache/v1/staging", "shard", "key", "entry"]
LED_HOME = ["cache/v1", "cache/v1/e", "cache/v1/staging", "cache/v1/quarantine"]


def test_a_root_behind_a_link_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A user may have moved the cache to another disk; what counts is the folder there."""
    (tmp_path / "other disk").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to("other disk")

    made = ask(tmp_path)
    found = store_in(tmp_path).find(KEY)

    assert made.path == entry_folder(tmp_path, KEY)
    assert found == made
    assert warnings_in(caplog) == []


def test_a_root_behind_a_link_is_held_to_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A link does not make a folder that others may write in one's own."""
    (tmp_path / "all may write").mkdir()
    (tmp_path / "all may write").chmod(0o777)
    (tmp_path / "cache").symlink_to("all may write")

    entry = ask(tmp_path)

    assert entry.path is None
    assert tree(tmp_path / "all may write") == []
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("folder", INSIDE)
def test_a_link_inside_the_cache_is_not_followed(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A sound entry behind it is not loaded, nothing is written there, and nothing is deleted."""
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
    if folder == "entry":  # the only one that can be set aside
        assert entries[1].path == entry_folder(tmp_path, KEY)
        assert whole_entries(tmp_path) == 1
    else:
        assert "a symbolic link at " in warnings_in(caplog)[0]
        assert store.look_up(KEY).layer is None


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two other users")
@pytest.mark.parametrize(
    ("place", "is_shared"),
    # Who trusts others lets them say where the root is.
    [("cache", False), *itertools.product(LED_HOME, [False, True])],
)
def test_a_cache_that_a_stranger_made_first_deletes_nothing_of_its_user(
    place: str, is_shared: bool
) -> None:
    """A link that leads home from a folder with a name that all know is not followed."""
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
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if somebody knew the name, it is neither written through nor waited for."""
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
def test_a_link_in_the_place_of_a_note_is_not_written_through(name: str, tmp_path: Path) -> None:
    """What it points at stays as it is."""
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
    """Content decides whether it is served; the other file keeps its content and its mode."""
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
    """Their last part is at least 32 bits of the system's randomness, new each time."""
    layout = Layout(tmp_path)

    parts = [layout.new_staging("ab").name.rpartition(".")[2] for _ in range(1000)]

    assert all(re.fullmatch(r"[0-9a-f]{8,}", part) for part in parts)
    assert len(set(parts)) > 990
    assert len({part[-1] for part in parts}) == 16


# Run in a fresh interpreter, on a cache full of what Python would like to run.
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
    """Python files, pickles and libraries beside the entries are as if they were not there."""
    ask(tmp_path)
    folders = [tmp_path / "cache", *(p for p in (tmp_path / "cache").rglob("*") if p.is_dir())]
    for folder in folders:
        for name in TRAPS:
            (folder / name).write_text("raise SystemExit('run')\n")
    command = [sys.executable, "-c", LOOK, str(tmp_path)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


# What turns bytes into objects or code. Of importlib, the metadata of what is installed is used.
RUNNERS = {"code", "dill", "imp", "marshal", "pickle", "runpy", "shelve", "cloudpickle"}
CALLS = {"eval", "exec", "compile", "__import__", "import_module"}


@pytest.mark.parametrize("file", sorted((ROOT / "mlagen/cache").glob("*.py")), ids=lambda p: p.name)
def test_the_cache_has_nothing_that_could_run_what_it_reads(file: Path) -> None:
    """No module of it imports or calls what runs bytes; JSON is all that it reads."""
    names = set()
    called = set()

    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
        elif isinstance(node, ast.Call):
            # A method has its name behind a dot: `re.compile` is none of these.
            called.add(getattr(node.func, "id", None))

    assert {name.partition(".")[0] for name in names} & RUNNERS == set()
    assert called & CALLS == set()
