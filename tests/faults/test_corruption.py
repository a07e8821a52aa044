"""Entries that differ from what was published: quarantined with one warning, and rebuilt."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlagen.cache.entry import Manifest
from mlagen.cache.key import CacheKey
from tests.cache import builds
from tests.cache.builds import CountedBuild, entry_folder, make_build, make_key, tree
from tests.faults.steps import KEY, ask, store_in, warnings_in, whole_entries
from tests.fixture_types import Log, Patch

OTHER = make_key("another kernel")
OTHER_CUBIN = b"\x7fELF another kernel"
CODE, MANIFEST = "kernel.cubin", "manifest.json"

Damage = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder whose store has two kernels."""
    ask(tmp_path)
    ask(tmp_path, OTHER, lambda: make_build(OTHER_CUBIN))
    return tmp_path


def cut(name: str, length: Callable[[int], int]) -> Damage:
    """Return a function that truncates or extends a file."""
    return lambda entry: os.truncate(entry / name, length((entry / name).stat().st_size))


def blank(name: str) -> Damage:
    """Return a function that keeps the size of a file, without its content."""
    return lambda entry: (entry / name).write_bytes(bytes((entry / name).stat().st_size))


def flip(entry: Path) -> None:
    """Flip a byte of the code."""
    content = bytearray((entry / CODE).read_bytes())
    content[len(content) // 2] ^= 0xFF
    (entry / CODE).write_bytes(content)


def swap(*names: str) -> Damage:
    """Return a function that replaces files of an entry by those of another one."""

    def act(entry: Path) -> None:
        other = entry.parents[2] / OTHER.digest[:2] / OTHER.digest / OTHER.toolchain
        for name in names:
            shutil.copyfile(other / name, entry / name)

    return act


def claim(*, seals: bool, **changes: object) -> Damage:
    """Return a function that changes fields of the manifest, with or without a valid seal."""

    def act(entry: Path) -> None:
        text = (entry / MANIFEST).read_bytes()
        if seals:
            text = replace(Manifest.from_json(text), **changes).to_json()  # type: ignore[arg-type]
        else:
            text = json.dumps({**json.loads(text), **changes}).encode()
        (entry / MANIFEST).write_bytes(text)

    return act


def become(kind: Callable[[Path], object], name: str) -> Damage:
    """Return a function that replaces an entry, or a file of it, by another kind of file."""

    def act(entry: Path) -> None:
        # A file at the end of a link is whole, but may change at any time.
        shutil.move(entry / name, entry.parents[2] / "aside")
        kind(entry / name)

    return act


LENGTHS: dict[str, Callable[[int], int]] = {
    "nothing": lambda _: 0,
    "one byte": lambda _: 1,
    "63 bytes": lambda _: 63,
    "one half": lambda size: size // 2,
    "all but two bytes": lambda size: size - 2,
    "all but one byte": lambda size: size - 1,
    "one byte more": lambda size: size + 1,
    "a tebibyte": lambda _: 1 << 40,
}
KINDS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda _: None,
    "a FIFO": os.mkfifo,
    "a file": Path.touch,
    "a folder": Path.mkdir,
    "a folder with a file": lambda path: (path / "inside").mkdir(parents=True),
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to what was published": lambda path: path.symlink_to(path.parents[3] / "aside"),
    "an endless file": lambda path: path.symlink_to("/dev/zero"),
}
ARCH = (("family", "mla_sm80"), ("spec.arch", "sm_100f"), ("spec.page_size", "64"))
ELSEWHERE = CacheKey(ARCH, KEY.toolchain)
DAMAGES: dict[str, Damage] = {
    **{
        f"{name} cut to {length}": cut(name, LENGTHS[length])
        for name in (CODE, MANIFEST)
        for length in LENGTHS
    },
    **{
        f"{name or 'entry'}: {kind}": become(KINDS[kind], name)
        for name in (CODE, MANIFEST, "")
        for kind in KINDS
    },
    "code of zeros": blank(CODE),
    "a manifest of zeros": blank(MANIFEST),
    "a flipped byte": flip,
    "the manifest noise": lambda entry: (entry / MANIFEST).write_bytes(b"\0\xffgarbage"),
    "the code of another key": swap(CODE),
    "the manifest of another key": swap(MANIFEST),
    "code and manifest of another key": swap(CODE, MANIFEST, "kernel.cu", "build.log"),
    "another architecture": claim(seals=False, key_fields=ARCH),
    "another architecture, and its key": claim(seals=True, key_fields=ARCH, key=ELSEWHERE.digest),
    "another compiler": claim(seals=True, toolchain="nvrtc-12.8.1"),
    "other facts": claim(seals=False, facts={"kernel": {"symbol": "other"}}),
    "facts without resources": claim(seals=True, facts={"kernel": {}, "compile_ms": 1.5}),
    "a time that JSON lacks": claim(
        seals=True, facts={**builds.make_build().facts, "compile_ms": float("nan")}
    ),
    "another schema without its seal": claim(seals=False, schema=2),
    "another size": claim(seals=False, files={}),
    "no files": claim(seals=True, files={}),
    "code elsewhere": claim(seals=True, files={"../../kernel.cubin": {"size": 1, "sha256": ""}}),
}
# Only a line feed is missing, and no entry is absent, not damaged.
for harmless in (f"{MANIFEST} cut to all but one byte", "entry: nothing"):
    del DAMAGES[harmless]


@pytest.mark.timeout(15)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_quarantined_and_rebuilt(damage: Damage, folder: Path, caplog: Log) -> None:
    """A miss, one warning, one quarantined entry with its reason, one build, then hits again."""
    damage(entry_folder(folder, KEY))
    store, build = store_in(folder), CountedBuild()

    found = store.find(KEY)
    entries = [store.find_or_build(KEY, build) for _ in range(2)]

    assert found is None
    assert build.calls == 1
    assert entries[0] == entries[1] == store_in(folder).find(KEY)
    assert (entries[0].cubin, entries[0].path) == (builds.CUBIN, entry_folder(folder, KEY))
    (cell,) = (folder / "cache/v1/quarantine").iterdir()
    assert os.path.lexists(cell / "entry")
    reason = json.loads((cell / "reason.json").read_text())["reason"]
    assert ": expected " in reason
    assert warnings_in(caplog) == [f"cache: damaged entry moved to {cell}: {reason}"]
    assert whole_entries(folder) == 2


@pytest.mark.timeout(15)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_does_not_disturb_the_commands(damage: Damage, folder: Path) -> None:
    """A damaged entry is listed, fails verification, is not changed by that, and can be removed."""
    damage(entry_folder(folder, KEY))
    store, before = store_in(folder), tree(folder)

    (stored,) = store.select(KEY.digest)
    problem, after = store.verify(stored), tree(folder)
    store.remove(stored)

    assert problem is not None
    assert after == before
    assert not os.path.lexists(entry_folder(folder, KEY))
    assert [stored.key for stored in store.entries()] == [OTHER.digest]


@pytest.mark.parametrize("name", ["kernel.cu", "build.log", "one more"])
def test_damage_of_unread_files_affects_no_call(name: str, folder: Path, caplog: Log) -> None:
    """Only `verify` reports damage of files that no call reads; extra files are ignored."""
    (entry_folder(folder, KEY) / name).write_bytes(b"not what was published")
    (stored,) = store_in(folder).select(KEY.digest)
    build = CountedBuild()

    entry = ask(folder, build=build)
    problem = store_in(folder).verify(stored)
    store_in(folder).remove(stored)

    assert (entry.cubin, build.calls) == (builds.CUBIN, 0)
    assert warnings_in(caplog) == []
    assert (problem is None) == (name == "one more")
    assert not entry_folder(folder, KEY).exists()


def test_a_sealed_manifest_of_another_architecture_is_reported(folder: Path) -> None:
    """The code is right, and `verify` reports that the key fields do not match the key."""
    claim(seals=True, key_fields=ARCH)(entry_folder(folder, KEY))
    (stored,) = store_in(folder).select(KEY.digest)
    assert ask(folder).cubin == builds.CUBIN
    assert (store_in(folder).verify(stored) or "").startswith("manifest.json: expected key_fields")


def test_swapped_entries_are_both_found(folder: Path, caplog: Log) -> None:
    """Two swapped entries are two damaged entries."""
    mine, theirs = entry_folder(folder, KEY), entry_folder(folder, OTHER)
    mine.rename(folder / "aside")
    theirs.rename(mine)
    (folder / "aside").rename(theirs)
    entries = [ask(folder), ask(folder, OTHER, lambda: make_build(OTHER_CUBIN))]
    assert [entry.cubin for entry in entries] == [builds.CUBIN, OTHER_CUBIN]
    assert len(warnings_in(caplog)) == 2
    assert whole_entries(folder) == 2


def test_damage_that_cannot_be_moved_costs_a_build_only(
    folder: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """On a read-only folder a damaged entry is reported, stays, and is not loaded."""
    flip(entry_folder(folder, KEY))
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", builds.failing(errno.EROFS))
        entry = ask(folder)
    assert (entry.cubin, entry.path) == (builds.CUBIN, None)
    assert "stays at" in caplog.messages[0]
    assert os.strerror(errno.EROFS) in caplog.messages[0]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("repetition", range(5), ids="run {}".format)
def test_damage_found_by_many_is_built_once(repetition: int, folder: Path) -> None:
    """A process that finds damage late does not remove the rebuilt entry."""
    flip(entry_folder(folder, KEY))
    build = CountedBuild(seconds=0.05 + 0.01 * repetition)
    # Separate stores, so that the threads behave like processes.
    entries = builds.together([lambda: ask(folder, build=build)] * 8)
    assert build.calls == 1
    assert {entry.cubin for entry in entries} == {builds.CUBIN}
    assert store_in(folder).find(KEY) is not None


def test_the_quarantine_of_much_damage_is_limited(folder: Path) -> None:
    """The quarantine has a fixed number of entries at most."""
    for _ in range(30):
        (entry_folder(folder, KEY) / CODE).write_bytes(b"")
        ask(folder)
    cells = list((folder / "cache/v1/quarantine").iterdir())
    assert len(cells) == 20
    assert all(tree(cell).count("reason.json") == 1 for cell in cells)
