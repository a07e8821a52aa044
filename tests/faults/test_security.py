"""Folders that other users can write: rejected with one warning, unless they are trusted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.cache.file import decode_all
from mlagen.cache.lock import _warn
from mlagen.cache.store import KernelStore
from mlagen.cache.trust import remedy_for
from tests.cache import builds
from tests.cache.builds import CountedBuild, entry_path, make_build, make_key, tree
from tests.faults.steps import KEY, ask, store_in, warnings_in
from tests.faults.strangers import FOLDERS, STRANGER, folder_of, give_away
from tests.fixture_types import Log, Patch

OTHER = make_key("another kernel")


def modes_below(folder: Path) -> dict[str, set[int]]:
    """Return the modes of all folders and files below a folder, including itself."""
    made = [folder, *folder.rglob("*")]
    return {
        "folders": {path.stat().st_mode & 0o7777 for path in made if path.is_dir()},
        "files": {path.stat().st_mode & 0o7777 for path in made if path.is_file()},
    }


def _use_all_of_it(folder: Path, *, is_shared: bool) -> None:
    """Publish, lock, and find damage."""
    store = store_in(folder, is_shared=is_shared)
    for key in (KEY, OTHER):
        store.find_or_build(key, make_build)
    entry_path(folder, KEY).write_bytes(b"damaged")
    assert store.find(KEY) is None


@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o027, 0o077], ids="umask {:03o}".format)
def test_all_is_private_or_in_a_shared_cache_of_the_umask(
    umask: int, is_shared: bool, tmp_path: Path
) -> None:
    """Entries and folders have these modes; the folder of locks is private."""
    before = os.umask(umask)
    try:
        _use_all_of_it(tmp_path, is_shared=is_shared)
    finally:
        os.umask(before)

    masked = umask if is_shared else 0o077
    expected = {"folders": {0o777 & ~masked}, "files": {0o666 & ~masked}}
    assert modes_below(tmp_path / "cache") == expected
    assert (tmp_path / "locks").stat().st_mode & 0o777 == 0o700


# Problem of a folder, and its name in the warning.
OPEN: dict[str, tuple[Callable[[Path, Patch], object], str]] = {
    "all may write": (lambda path, _: path.chmod(0o777), "mode 0777, which lets others write"),
    "all may write, sticky": (lambda path, _: path.chmod(0o1777), "mode 1777, which lets others"),
    "the group may write": (lambda path, _: path.chmod(0o770), "mode 0770, which lets others"),
    "another user's": (give_away, "a folder of user "),
}


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(("spoil", "word"), OPEN.values(), ids=OPEN)
def test_a_folder_that_others_may_write_is_rejected(
    spoil: Callable[[Path, Patch], object],
    word: str,
    folder: str,
    tmp_path: Path,
    monkeypatch: Patch,
    caplog: Log,
) -> None:
    """Its entries are not loaded, nothing is written, and one warning has the reason and remedy."""
    ask(tmp_path)
    spoiled = folder_of(tmp_path, folder)
    spoil(spoiled, monkeypatch)
    before = tree(tmp_path / "cache")
    store, build = store_in(tmp_path), CountedBuild()

    entries = [store.find_or_build(KEY, build) for _ in range(2)]

    assert build.calls == 1
    assert {entry.cubin for entry in entries} == {builds.CUBIN}
    assert {entry.path for entry in entries} == {None}
    assert store.look_up(KEY).layer is None
    assert tree(tmp_path / "cache") == before
    (warning,) = warnings_in(caplog)
    assert word in warning
    is_own = os.geteuid() == 0 or "user" not in word
    root = tmp_path / "cache"
    # For another user, the root is the first untrusted folder.
    assert f" at {spoiled if is_own else root} (" in warning
    command = f"sudo chown -R {os.geteuid()}" if "user" in word else "chmod -R go-w"
    advice = f"{command} {root}, choose another folder, or set MLAGEN_TRUST_SHARED=1"
    assert f"({advice}), storing kernels in memory: {root}" in warning


def test_the_remedy_for_a_folder_of_root_takes_root(monkeypatch: Patch, tmp_path: Path) -> None:
    """Its modes are root's to change."""
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    status = os.stat_result((0o40777, 0, 0, 1, 0, 0, 0, 0, 0, 0))
    assert remedy_for(status, tmp_path) == f"sudo chmod -R go-w {tmp_path}"


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("spoil", [pair[0] for pair in OPEN.values()], ids=OPEN)
def test_a_folder_that_others_may_write_is_used_with_trust(
    spoil: Callable[[Path, Patch], object],
    folder: str,
    tmp_path: Path,
    monkeypatch: Patch,
    caplog: Log,
) -> None:
    """With MLAGEN_TRUST_SHARED=1 the same cache is read and written without a warning."""
    ask(tmp_path)
    with monkeypatch.context() as patch:  # the locks stay private
        spoil(folder_of(tmp_path, folder), patch)
    store, build = store_in(tmp_path, is_shared=True), CountedBuild()

    found = store.find_or_build(KEY, build)
    made = store.find_or_build(OTHER, build)

    assert build.calls == 1
    assert found.path == entry_path(tmp_path, KEY)
    assert made.path == entry_path(tmp_path, OTHER)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(("spoil", "word"), OPEN.values(), ids=OPEN)
def test_a_layer_that_others_may_write_is_ignored(
    spoil: Callable[[Path, Patch], object],
    word: str,
    tmp_path: Path,
    monkeypatch: Patch,
    caplog: Log,
) -> None:
    """A read-only layer passes the same checks; failing them costs a build and one warning."""
    ask(tmp_path / "shipped")
    layer = tmp_path / "shipped/cache"
    spoil(layer, monkeypatch)
    if os.geteuid() != os.getuid():
        pytest.skip("another effective user makes every folder untrusted")
    build = CountedBuild()

    entry = store_in(tmp_path, layers=[layer]).find_or_build(KEY, build)

    assert build.calls == 1
    assert entry.path == entry_path(tmp_path, KEY)
    (warning,) = warnings_in(caplog)
    assert warning.startswith(f"cache: expected a readable layer, got {word}")
    assert "ignoring it" in warning


@pytest.mark.parametrize(
    "spoil", [*(pair[0] for pair in OPEN.values()), "link"], ids=[*OPEN, "a link"]
)
def test_a_lock_folder_of_another_user_is_not_used(
    spoil: Callable[[Path, Patch], object] | str, tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """A well-known lock folder created by another user is not used, with one warning."""
    _warn.cache_clear()
    locks = tmp_path / "locks"
    (tmp_path / "elsewhere").mkdir()
    if callable(spoil):
        locks.mkdir(mode=0o700)
        ask(tmp_path / "first")  # another user cannot do this, so it is done before
        spoil(locks, monkeypatch)
    else:
        locks.symlink_to("elsewhere")
    is_stranger = os.geteuid() != os.getuid()
    store = store_in(tmp_path, is_shared=is_stranger)

    entries = [store.find_or_build(key, make_build) for key in (KEY, OTHER)]

    assert [entry.path for entry in entries] == [
        entry_path(tmp_path, KEY),
        entry_path(tmp_path, OTHER),
    ]
    assert list(locks.iterdir()) == []
    (warning,) = warnings_in(caplog)
    assert warning.startswith("lock: expected a folder of this user, got ")
    assert "(choose another MLAGEN_LOCK_DIR), compiling without: " in warning


def test_a_manifest_holds_no_environment(tmp_path: Path, monkeypatch: Patch) -> None:
    """No file of the cache contains environment variables."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-publish")
    _use_all_of_it(tmp_path, is_shared=False)
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert [path for path in files if b"do-not-publish" in path.read_bytes()] == []
    manifest, _ = decode_all(entry_path(tmp_path, OTHER).read_bytes())
    created = manifest.created
    assert set(created) == {"because", "host", "mlagen", "pid", "python", "time"}
    assert isinstance(store_in(tmp_path), KernelStore)
