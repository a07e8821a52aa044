"""Entries that differ from what was published: deleted with one warning, and rebuilt."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.cache.store import verify
from tests.cache import builds
from tests.cache.builds import (
    CountedBuild,
    Parts,
    cut,
    edit,
    entry_path,
    make_build,
    make_file,
    make_key,
    tree,
)
from tests.faults.steps import KEY, ask, store_in, warnings_in, whole_entries
from tests.fixture_types import Log, Patch

OTHER = make_key("another kernel")
OTHER_CUBIN = b"\x7fELF another kernel"

Damage = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder whose store has two kernels."""
    ask(tmp_path)
    ask(tmp_path, OTHER, lambda: make_build(OTHER_CUBIN))
    return tmp_path


def resized(length: Callable[[int], int]) -> Damage:
    """Return a function that truncates or extends an entry."""
    return lambda entry: cut(entry, length(entry.stat().st_size))


def flip(entry: Path) -> None:
    """Flip a byte of the code."""
    place = entry.read_bytes().index(builds.CUBIN) + 500
    edit(entry, lambda file: file[:place] + bytes([file[place] ^ 0xFF]) + file[place + 1 :])


def with_parts(change: Callable[[Parts, Parts], bytes]) -> Damage:
    """Return a function that builds an entry of its own parts, and of those of another one."""

    def act(entry: Path) -> None:
        other = Parts.of(entry_path(entry.parents[3], OTHER).read_bytes())
        edit(entry, lambda file: change(Parts.of(file), other))

    return act


def claim(**changes: object) -> Damage:
    """Return a function that changes fields of the manifest, under a valid digest."""
    return with_parts(lambda own, _: own.sealed(**changes))


def become(kind: Callable[[Path], object]) -> Damage:
    """Return a function that replaces an entry by another kind of file."""

    def act(entry: Path) -> None:
        # A file at the end of a link is whole, but may change at any time.
        shutil.move(entry, entry.parents[1] / "aside")
        kind(entry)

    return act


LENGTHS: dict[str, Callable[[int], int]] = {
    "nothing": lambda _: 0,
    "one byte": lambda _: 1,
    "43 bytes": lambda _: 43,
    "its head": lambda _: 44,
    "one half": lambda size: size // 2,
    "all but one byte": lambda size: size - 1,
    "one byte more": lambda size: size + 1,
    "a tebibyte": lambda _: 1 << 40,
}
KINDS: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "an empty file": Path.touch,
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to what was published": lambda path: path.symlink_to(path.parents[1] / "aside"),
    "an endless file": lambda path: path.symlink_to("/dev/zero"),
}
ARCH = (("family", "mla_sm80"), ("spec.arch", "sm_100f"), ("spec.page_size", "64"))
DAMAGES: dict[str, Damage] = {
    **{f"cut to {name}": resized(length) for name, length in LENGTHS.items()},
    **{name: become(kind) for name, kind in KINDS.items()},
    "zeros": lambda entry: edit(entry, lambda file: bytes(len(file))),
    "noise": lambda entry: edit(entry, lambda file: b"\0\xffgarbage" * (len(file) // 9)),
    "a flipped byte": flip,
    "the entry of another key": lambda entry: edit(entry, lambda _: make_file(OTHER)),
    "the code of another key": with_parts(
        lambda own, other: own._replace(cubin=other.cubin).sealed()
    ),
    "the manifest of another key": with_parts(
        lambda own, other: own._replace(manifest=other.manifest).sealed()
    ),
    "another key": claim(key="0" * 64),
    "another compiler": claim(toolchain="nvrtc-12.8.1"),
    "facts without resources": claim(facts={"kernel": {}, "compile_ms": 1.5}),
    "a time that JSON lacks": claim(facts={**make_build().facts, "compile_ms": float("nan")}),
    "no files": claim(files={}),
}


@pytest.mark.timeout(15)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_deleted_and_rebuilt(damage: Damage, folder: Path, caplog: Log) -> None:
    """A miss, one warning with the reason, one build, then hits again."""
    path = entry_path(folder, KEY)
    damage(path)
    store, build = store_in(folder), CountedBuild()

    found = store.look_up(KEY)
    is_deleted = not os.path.lexists(path)
    entries = [store.find_or_build(KEY, build) for _ in range(2)]

    assert (found.entry, found.reason, is_deleted) == (None, "damaged", True)
    assert "expected " in str(found.problem)
    assert build.calls == 1
    assert entries[0] == entries[1] == store_in(folder).find(KEY)
    assert (entries[0].cubin, entries[0].path) == (builds.CUBIN, path)
    assert warnings_in(caplog) == [f"cache: damaged entry removed from {path}: {found.problem}"]
    assert whole_entries(folder) == 2


@pytest.mark.timeout(15)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_does_not_disturb_the_commands(damage: Damage, folder: Path) -> None:
    """A damaged entry is listed, fails verification, is not changed by that, and can be removed."""
    damage(entry_path(folder, KEY))
    store, before = store_in(folder), tree(folder)

    (stored,) = store.select(KEY.digest)
    problem, after = verify(stored), tree(folder)
    store.remove(stored)

    assert problem is not None
    assert after == before
    assert not os.path.lexists(entry_path(folder, KEY))
    assert [stored.key for stored in store.entries()] == [OTHER.digest]


def test_damage_of_unread_files_affects_no_call(folder: Path, caplog: Log) -> None:
    """Only `verify` reports damage of files that no call reads."""
    edit(entry_path(folder, KEY), lambda file: file[:-6] + b"!" * 6)
    (stored,) = store_in(folder).select(KEY.digest)
    build = CountedBuild()
    entry = ask(folder, build=build)
    assert (entry.cubin, build.calls) == (builds.CUBIN, 0)
    assert warnings_in(caplog) == []
    assert verify(stored) is not None


def test_a_sealed_manifest_of_another_architecture_is_reported(folder: Path) -> None:
    """The code is right, and `verify` reports that the key fields do not match the key."""
    claim(key_fields=ARCH)(entry_path(folder, KEY))
    (stored,) = store_in(folder).select(KEY.digest)
    assert ask(folder).cubin == builds.CUBIN
    assert (verify(stored) or "").startswith("manifest: expected key_fields")


def test_swapped_entries_are_both_found(folder: Path, caplog: Log) -> None:
    """Two swapped entries are two damaged entries."""
    mine, theirs = entry_path(folder, KEY), entry_path(folder, OTHER)
    mine.rename(folder / "aside")
    theirs.rename(mine)
    (folder / "aside").rename(theirs)
    entries = [ask(folder), ask(folder, OTHER, lambda: make_build(OTHER_CUBIN))]
    assert [entry.cubin for entry in entries] == [builds.CUBIN, OTHER_CUBIN]
    assert len(warnings_in(caplog)) == 2
    assert whole_entries(folder) == 2


@pytest.mark.parametrize("is_folder", [False, True], ids=["a read-only disk", "a folder"])
def test_damage_that_cannot_be_deleted_costs_a_build_only(
    is_folder: bool, folder: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """It is reported, stays, and is not loaded; the kernel is kept in memory."""
    path = entry_path(folder, KEY)
    become(lambda path: (path / "inside").mkdir(parents=True))(path) if is_folder else flip(path)
    store, build = store_in(folder), CountedBuild()
    with monkeypatch.context() as patch:
        if not is_folder:
            patch.setattr(os, "unlink", builds.failing(errno.EROFS))
        entries = [store.find_or_build(KEY, build) for _ in range(2)]
    assert [(entry.cubin, entry.path) for entry in entries] == [(builds.CUBIN, None)] * 2
    assert build.calls == 1
    assert warnings_in(caplog)[0].startswith(f"cache: damaged entry stays at {path}, ")
    assert os.path.lexists(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("repetition", range(5), ids="run {}".format)
def test_damage_found_by_many_is_built_once(repetition: int, folder: Path) -> None:
    """A process that finds damage late does not remove the rebuilt entry."""
    flip(entry_path(folder, KEY))
    build = CountedBuild(seconds=0.05 + 0.01 * repetition)
    # Separate stores, so that the threads behave like processes.
    entries = builds.together([lambda: ask(folder, build=build)] * 8)
    assert build.calls == 1
    assert {entry.cubin for entry in entries} == {builds.CUBIN}
    assert store_in(folder).find(KEY) is not None


def test_an_entry_that_replaces_damage_meanwhile_is_served(
    folder: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """Between the read and the deletion another process deletes the damage and publishes."""
    path = entry_path(folder, KEY)
    flip(path)
    valid, real, rounds = make_file(KEY), os.read, iter(range(100))

    def read(descriptor: int, size: int) -> bytes:
        content = real(descriptor, size)
        if next(rounds) == 0:
            path.unlink()
            path.write_bytes(valid)
            path.chmod(0o600)
        return content

    monkeypatch.setattr(os, "read", read)
    assert store_in(folder).find(KEY) is not None
    assert path.read_bytes() == valid
    assert warnings_in(caplog) == []
