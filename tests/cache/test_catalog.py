"""The listing of entries, including damaged ones; listing creates nothing."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from mlagen.cache.bundle_writing import export_bundle
from mlagen.cache.catalog import read_content, stored_entries, verify
from mlagen.cache.entry import Manifest
from mlagen.cache.errors import UnreadableError
from mlagen.cache.layout import Layout
from mlagen.errors import CacheError
from tests.cache.builds import (
    TOOLCHAIN,
    entry_folder,
    failing,
    make_build,
    make_key,
    make_store,
    tree,
)
from tests.fixture_types import Patch

KEYS = [make_key(f"family {number}") for number in range(5)]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """Return the layout of a cache with five entries."""
    store = make_store(tmp_path)
    for key in KEYS:
        store.find_or_build(key, make_build)
    return Layout(tmp_path / "cache")


def test_entries_come_in_the_order_of_their_keys(layout: Layout, tmp_path: Path) -> None:
    """Each entry is listed once, with its manifest, its folder and its size."""
    listed = list(stored_entries(layout))
    assert [stored.key for stored in listed] == sorted(key.digest for key in KEYS)
    for key in KEYS:
        stored = next(stored for stored in listed if stored.key == key.digest)
        folder = entry_folder(tmp_path, key)
        assert (stored.path, stored.toolchain, stored.problem) == (folder, TOOLCHAIN, None)
        assert stored.manifest is not None
        assert stored.manifest.key_fields == key.key_fields
        assert stored.size_bytes == sum(file.stat().st_size for file in folder.iterdir())


def test_prefix_selects(layout: Layout) -> None:
    """The prefix of one key lists the entries of that key only, for all toolchains."""
    digest = KEYS[3].digest
    assert [stored.key for stored in stored_entries(layout, digest[:6])] == [digest]
    assert [stored.key for stored in stored_entries(layout, digest)] == [digest]
    assert list(stored_entries(layout, "0" * 63)) == []


def test_damaged_entries_are_listed_with_their_problem(layout: Layout, tmp_path: Path) -> None:
    """An entry without a valid manifest has a problem instead, and does not stop the listing."""
    first, second, third, _, _ = (entry_folder(tmp_path, key) for key in KEYS)
    (first / "manifest.json").write_bytes(b"garbage")
    (second / "manifest.json").unlink()
    os.mkfifo(second / "manifest.json")
    third.rename(third.with_name("elsewhere"))
    third.touch()

    problems = {stored.path: stored.problem for stored in stored_entries(layout)}

    assert len(problems) == 6
    assert sum(problem is None for problem in problems.values()) == 2
    assert "expected a manifest" in str(problems[first])
    assert "expected a regular file, got another kind" in str(problems[second])
    assert "expected a folder, got another kind" in str(problems[third])


def test_strays_are_no_entries(layout: Layout) -> None:
    """Files and folders whose names are not keys are skipped."""
    (layout.entries / ".DS_Store").touch()
    (layout.entries / "ab").mkdir(exist_ok=True)
    (layout.entries / "ab" / "notes.txt").touch()
    (layout.entries / "ab" / ("ab" * 32)).touch()
    assert len(list(stored_entries(layout))) == 5


@pytest.mark.parametrize("kind", ["absent", "a file"])
def test_listing_no_cache_creates_none(kind: str, tmp_path: Path) -> None:
    """Without a cache folder, there are no entries, and none is created."""
    if kind == "a file":
        (tmp_path / "cache").touch()
    before = tree(tmp_path)
    assert list(stored_entries(Layout(tmp_path / "cache"))) == []
    assert tree(tmp_path) == before


def test_folder_that_cannot_be_read_is_a_cache_error(layout: Layout, monkeypatch: Patch) -> None:
    """An incomplete listing is an error that names the folder."""
    monkeypatch.setattr(os, "listdir", failing(errno.EACCES))
    with pytest.raises(CacheError, match="readable folder, got Permission denied") as caught:
        list(stored_entries(layout))
    assert caught.value.path == layout.entries


@pytest.mark.parametrize("name", ["kernel.cubin", "kernel.cu", "build.log", "manifest.json"])
@pytest.mark.parametrize("damage", ["changed", "longer", "missing"])
def test_verify_reads_every_file(name: str, damage: str, layout: Layout, tmp_path: Path) -> None:
    """Verify names the first file that differs from what was published."""
    stored = next(stored_entries(layout, KEYS[0].digest))
    file = entry_folder(tmp_path, KEYS[0]) / name
    content = file.read_bytes()
    assert verify(stored) is None

    if damage == "missing":
        file.unlink()
    elif damage == "longer":
        file.write_bytes(content + b"!")
    else:
        file.write_bytes(b"!" * max(1, len(content)))

    assert str(verify(stored)).startswith(f"{name}: expected ")


@pytest.mark.parametrize("name", ["kernel.cubin", "kernel.cu", "manifest.json"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE], ids=errno.errorcode.__getitem__)
def test_an_entry_that_cannot_be_read_is_not_damaged(
    code: int, name: str, layout: Layout, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Listing, verification, content and export say so, and it keeps its last use."""
    before = next(stored_entries(layout, KEYS[0].digest))
    path, opened = entry_folder(tmp_path, KEYS[0]) / name, os.open

    def reject(path: str, flags: int, *rest: int, dir_fd: int | None = None) -> int:
        if path == name:
            raise OSError(code, os.strerror(code))
        return opened(path, flags, *rest, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", reject)
    (stored,) = stored_entries(layout, KEYS[0].digest)

    text = f"expected a readable entry, got {os.strerror(code)}"
    assert (stored.problem, stored.is_damaged) == (text if name == "manifest.json" else None, False)
    assert (stored.used, stored.size_bytes) == (before.used, before.size_bytes)
    target = tmp_path / "kernels.tar.gz"
    for read in (
        verify,
        lambda stored: read_content(stored, name),
        lambda stored: export_bundle([stored], target),
    ):
        with pytest.raises(UnreadableError, match=f"^cache: {text}: {path}$"):
            read(stored)
    assert not target.exists()


def test_verify_compares_the_key_with_the_key_fields(layout: Layout, tmp_path: Path) -> None:
    """A sealed manifest of another kernel is rejected."""
    path = entry_folder(tmp_path, KEYS[0]) / "manifest.json"
    manifest = Manifest.from_json(path.read_bytes())
    path.write_bytes(replace(manifest, key_fields=KEYS[1].key_fields).to_json())
    (stored,) = stored_entries(layout, KEYS[0].digest)
    expected = f"expected key_fields of {KEYS[0].digest}, got of {KEYS[1].digest}"
    assert verify(stored) == f"manifest.json: {expected}"


def test_verify_of_a_removed_entry_raises(layout: Layout, tmp_path: Path) -> None:
    """An entry removed since listing is neither valid nor damaged."""
    stored = next(stored_entries(layout, KEYS[0].digest))
    entry_folder(tmp_path, KEYS[0]).rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        verify(stored)
