"""Writing a bundle: sound entries, the same bytes each time, and a file that appears whole."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from mlagen.cache import bundle_writing
from mlagen.cache.bundle import BundleError
from mlagen.cache.bundle_writing import export_bundle, write_bundle
from mlagen.cache.entry import Manifest
from mlagen.cache.layout import Layout
from mlagen.cache.publish import publish
from mlagen.cache.store import KernelStore
from tests.cache.builds import entry_folder, make_build, make_store, tree
from tests.cache.bundle_cases import FAMILIES, filled_store, key_for, members_of, packed


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    """Return a store of two kernels."""
    return filled_store(tmp_path)


def out(folder: Path) -> Path:
    """Return an empty folder for bundles."""
    made = folder / "out"
    made.mkdir()
    return made


def test_the_same_entries_make_the_same_bytes(store: KernelStore, tmp_path: Path) -> None:
    """Neither the order in which they are named, nor the file or the time of writing matters."""
    target = out(tmp_path) / "other-name.tar.gz"
    entries = list(store.entries())

    export_bundle(entries[::-1], target)

    assert target.read_bytes() == packed(store)


def test_the_result_is_told(store: KernelStore, tmp_path: Path) -> None:
    """The digest and the sizes are those of the file, the targets those of the kernels."""
    target = out(tmp_path) / "kernels.tar.gz"

    written = export_bundle(list(store.entries()), target)

    content = target.read_bytes()
    assert written.sha256 == hashlib.sha256(content).hexdigest()
    assert written.size_bytes == len(content)
    assert written.content_bytes == sum(len(member.content) for member in members_of(content)[1:])
    assert written.archs == ["sm_90a"]
    assert written.toolchains == ["nvrtc-13.5.37"]


def test_other_programs_can_read_it(store: KernelStore) -> None:
    """It is a tar as anybody's, of plain files that belong to nobody."""
    members = members_of(packed(store))

    infos = [member.info for member in members]
    assert infos[0].name == "bundle.json"
    assert {(info.type, info.mode, info.uid, info.mtime) for info in infos} == {
        (tarfile.REGTYPE, 0o644, 0, 0)
    }


def test_nothing_of_this_machine_is_in_the_table_of_contents(store: KernelStore) -> None:
    """What the manifests say of their making stays in the manifests."""
    index = members_of(packed(store))[0].content.decode()

    assert os.uname().nodename not in index
    assert str(store.root) not in index


def test_progress_ends_at_the_total(store: KernelStore) -> None:
    """Each entry moves it on."""
    seen: list[tuple[int, int]] = []

    written = write_bundle(
        list(store.entries()), io.BytesIO(), on_progress=lambda *done: seen.append(done)
    )

    assert len(seen) == len(FAMILIES)
    assert seen[-1] == (written.content_bytes, written.content_bytes)


@pytest.mark.parametrize("name", ["kernel.cubin", "kernel.cu", "build.log", "manifest.json"])
@pytest.mark.parametrize("fault", ["changed", "missing"])
def test_a_damaged_entry_stops_the_export(
    name: str, fault: str, store: KernelStore, tmp_path: Path
) -> None:
    """Whichever file it is, the error names the entry, and the old bundle stays as it was."""
    target = out(tmp_path) / "kernels.tar.gz"
    target.write_bytes(b"the old one")
    folder = entry_folder(tmp_path, key_for(FAMILIES[0]))
    if fault == "changed":
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content.replace(b"1", b"2") + b" ")
    else:
        (folder / name).unlink()

    with pytest.raises(BundleError, match=rf"^bundle: expected a sound entry, .*{name}") as caught:
        export_bundle(list(store.entries()), target)

    assert caught.value.path == folder
    assert target.read_bytes() == b"the old one"
    assert tree(target.parent) == [target.name]


def test_a_kernel_that_is_no_elf_file_stops_the_export(tmp_path: Path) -> None:
    """What could not be imported is not exported."""
    store = make_store(tmp_path)
    build = make_build(b"#!/bin/sh\n")
    publish(Layout(store.root), Manifest.of(key_for("x"), build, created_by="jit"), build.files)

    with pytest.raises(BundleError, match=r"kernel.cubin: expected an ELF file, got"):
        packed(store)


def test_what_is_in_the_place_is_replaced(store: KernelStore, tmp_path: Path) -> None:
    """A bundle is renewed under its name, and nothing else stays in the folder."""
    target = out(tmp_path) / "kernels.tar.gz"
    target.write_bytes(b"the old one")

    export_bundle(list(store.entries()), target)

    assert target.read_bytes() == packed(store)
    assert tree(target.parent) == [target.name]


@pytest.mark.parametrize("umask", [0o022, 0o077], ids="{:03o}".format)
def test_a_bundle_is_made_to_be_handed_on(umask: int, store: KernelStore, tmp_path: Path) -> None:
    """It has the mode that the umask leaves, unlike the private files of the cache."""
    target = out(tmp_path) / "kernels.tar.gz"
    before = os.umask(umask)
    try:
        export_bundle(list(store.entries()), target)
    finally:
        os.umask(before)

    assert target.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_folder_is_not_replaced(store: KernelStore, tmp_path: Path) -> None:
    """Where something else than a file stands, nothing is written."""
    folder = out(tmp_path)

    with pytest.raises(BundleError, match=f"expected a file, got another kind: {folder}"):
        export_bundle(list(store.entries()), folder)

    assert tree(folder) == []


@pytest.mark.parametrize("target", [Path(), Path("/"), Path("..")], ids=str)
def test_what_has_no_name_is_not_replaced(target: Path, store: KernelStore) -> None:
    """It is rejected as every other folder."""
    with pytest.raises(BundleError, match="expected a file, got another kind"):
        export_bundle(list(store.entries()), target)


def test_more_entries_than_can_be_imported_are_rejected(
    store: KernelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of contents would be too large; nothing is left."""
    monkeypatch.setattr(bundle_writing, "INDEX_MAX_BYTES", 1000)
    folder = out(tmp_path)

    with pytest.raises(BundleError, match=r"contents of at most 1000 bytes, got 1[0-9]{3}; export"):
        export_bundle(list(store.entries()), folder / "kernels.tar.gz")

    assert tree(folder) == []


def test_a_missing_folder_is_not_made(store: KernelStore, tmp_path: Path) -> None:
    """A name that is spelled wrong is told."""
    target = tmp_path / "nowhere" / "kernels.tar.gz"

    with pytest.raises(BundleError, match=f"got No such file or directory: {target}"):
        export_bundle(list(store.entries()), target)

    assert not target.parent.exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_leaves_nothing(
    code: int, store: KernelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a bundle never has the name of a bundle, and vanishes."""
    target = out(tmp_path) / "kernels.tar.gz"

    def reject(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", reject)

    with pytest.raises(BundleError, match=f"expected a writable file, got {os.strerror(code)}"):
        export_bundle(list(store.entries()), target)

    assert tree(target.parent) == []


def test_an_interrupted_export_leaves_nothing(store: KernelStore, tmp_path: Path) -> None:
    """Ctrl-C in the middle takes the half bundle with it."""
    target = out(tmp_path) / "kernels.tar.gz"

    def interrupt(_done: int, _total: int) -> None:
        assert len(tree(target.parent)) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_bundle(list(store.entries()), target, on_progress=interrupt)

    assert tree(target.parent) == []
