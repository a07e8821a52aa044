"""Entries that differ from what was published: quarantined with one warning, and rebuilt."""

from __future__ import annotations

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


def require_healed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Assert that the damaged entry of ``KEY`` is rebuilt once, and the rest is unchanged."""
    caplog.clear()
    build = CountedBuild()

    entries = [ask(folder, build=build) for _ in range(2)]

    assert [entry.cubin for entry in entries] == [builds.CUBIN] * 2
    assert {entry.path for entry in entries} == {entry_folder(folder, KEY)}
    assert build.calls == 1
    (warning,) = warnings_in(caplog)
    assert warning.startswith("cache: damaged entry moved to ")
    (other,) = [stored for stored in store_in(folder).entries() if stored.key == OTHER.digest]
    assert store_in(folder).verify(other) is None
    assert whole_entries(folder) == 2


LENGTHS: dict[str, Callable[[int], int]] = {
    "nothing": lambda _: 0,
    "one byte": lambda _: 1,
    "63 bytes": lambda _: 63,
    "one half": lambda size: size // 2,
    "all but two bytes": lambda size: size - 2,
    "all but one byte": lambda size: size - 1,
}
CUTS = {f"{name} to {length}": (name, length) for name in (CODE, MANIFEST) for length in LENGTHS}
del CUTS[f"{MANIFEST} to all but one byte"]  # only a line feed is missing


@pytest.mark.parametrize(("name", "length"), CUTS.values(), ids=CUTS)
def test_a_truncated_file_is_found(
    name: str, length: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Any truncation is found."""
    path = entry_folder(folder, KEY) / name
    os.truncate(path, LENGTHS[length](path.stat().st_size))

    require_healed(folder, caplog)






@pytest.mark.parametrize("name", ["kernel.cu", "build.log", "one more"])
def test_damage_of_unread_files_affects_no_call(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def swap(*names: str) -> Damage:
    """Return a function that swaps files of two entries."""

    def act(entry: Path) -> None:
        other = entry.parents[2] / OTHER.digest[:2] / OTHER.digest / OTHER.toolchain
        for name in names:
            (entry / name).rename(entry / "aside")
            shutil.copyfile(other / name, entry / name)
            (entry / "aside").unlink()

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


ARCH = (("family", "mla_sm80"), ("spec.arch", "sm_100f"), ("spec.page_size", "64"))
ELSEWHERE = CacheKey(ARCH, KEY.toolchain)

CLAIMS: dict[str, Damage] = {
    "the code of another key": swap(CODE),
    "the manifest of another key": swap(MANIFEST),
    "code and manifest of another key": swap(CODE, MANIFEST, "kernel.cu", "build.log"),
    "another architecture": claim(seals=False, key_fields=ARCH),
    "another architecture, and its key": claim(seals=True, key_fields=ARCH, key=ELSEWHERE.digest),
    "another compiler": claim(seals=True, toolchain="nvrtc-12.8.1"),
    "another size": claim(seals=False, files={}),
    "no files": claim(seals=True, files={}),
    "code elsewhere": claim(seals=True, files={"../../kernel.cubin": {"size": 1, "sha256": ""}}),
}


@pytest.mark.parametrize("damage", CLAIMS.values(), ids=CLAIMS)
def test_an_entry_of_another_kernel_is_found(
    damage: Damage, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A valid entry of another kernel is rejected."""
    damage(entry_folder(folder, KEY))

    require_healed(folder, caplog)


def test_a_sealed_manifest_of_another_architecture_is_reported(folder: Path) -> None:
    """The code is right, and `verify` reports that the key fields do not match the key."""
    claim(seals=True, key_fields=ARCH)(entry_folder(folder, KEY))

    (stored,) = store_in(folder).select(KEY.digest)

    assert ask(folder).cubin == builds.CUBIN
    assert (store_in(folder).verify(stored) or "").startswith("manifest.json: expected key_fields")


def test_swapped_entries_are_both_found(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two swapped entries are two damaged entries."""
    mine, theirs = entry_folder(folder, KEY), entry_folder(folder, OTHER)
    mine.rename(folder / "aside")
    theirs.rename(mine)
    (folder / "aside").rename(theirs)

    entries = [ask(folder), ask(folder, OTHER, lambda: make_build(OTHER_CUBIN))]

    assert [entry.cubin for entry in entries] == [builds.CUBIN, OTHER_CUBIN]
    assert len(warnings_in(caplog)) == 2
    assert whole_entries(folder) == 2


def become(kind: Callable[[Path], object], name: str = "") -> Damage:
    """Return a function that replaces an entry, or a file of it, by another kind of file."""

    def act(entry: Path) -> None:
        if name:
            (entry / name).unlink()
        else:
            shutil.rmtree(entry)
        kind(entry / name)

    return act


KINDS: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a file": Path.touch,
    "a folder": lambda path: (path / "inside").mkdir(parents=True),
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path),
    "an endless file": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.timeout(15)
@pytest.mark.parametrize("name", [CODE, MANIFEST, ""], ids=["code", "manifest", "entry"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_another_kind_of_file_is_neither_read_nor_blocking(
    name: str, kind: Callable[[Path], object], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Opening a FIFO would block, and reading a device would not end."""
    become(kind, name)(entry_folder(folder, KEY))

    require_healed(folder, caplog)




def test_the_quarantine_of_much_damage_is_limited(folder: Path) -> None:
    """The quarantine has a fixed number of entries at most."""
    for _ in range(30):
        (entry_folder(folder, KEY) / CODE).write_bytes(b"")
        ask(folder)

    cells = list((folder / "cache/v1/quarantine").iterdir())
    assert len(cells) == 20
    assert all(tree(cell).count("reason.json") == 1 for cell in cells)
