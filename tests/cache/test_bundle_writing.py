"""Bundle export: verified entries, reproducible bytes, and an atomic write."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import tarfile
import time
from pathlib import Path

import pytest

from mlagen.cache import bundle_writing
from mlagen.cache.bundle import BundleError
from mlagen.cache.bundle_writing import export_bundle, require_target, write_bundle
from mlagen.cache.entry import Manifest
from mlagen.cache.layout import Layout
from mlagen.cache.publish import publish
from mlagen.cache.store import KernelStore
from tests.cache.builds import entry_folder, failing, make_build, make_store, tree
from tests.cache.bundle_cases import FAMILIES, bundle_bytes, filled_store, key_for, members_of
from tests.fixture_types import Patch


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    """Return a store of two kernels."""
    return filled_store(tmp_path)


def out(folder: Path) -> Path:
    """Return an empty folder for bundles."""
    made = folder / "out"
    made.mkdir()
    return made


def test_the_same_entries_make_the_same_bytes(
    store: KernelStore, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The bytes depend neither on the order of entries nor on file name or time."""
    target = out(tmp_path) / "other-name.tar.gz"
    entries, expected = list(store.entries()), bundle_bytes(store)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    export_bundle(entries[::-1], target)
    assert target.read_bytes() == expected


def test_the_summary_describes_the_file(store: KernelStore, tmp_path: Path) -> None:
    """The summary has digest and sizes of the file, and the targets of its kernels."""
    target = out(tmp_path) / "kernels.tar.gz"
    written = export_bundle(list(store.entries()), target)
    content = target.read_bytes()
    assert written.sha256 == hashlib.sha256(content).hexdigest()
    assert written.size_bytes == len(content)
    assert written.content_bytes == sum(len(member.content) for member in members_of(content)[1:])
    assert written.archs == ["sm_90a"]
    assert written.toolchains == ["nvrtc-13.5.37"]


def test_other_programs_can_read_it(store: KernelStore) -> None:
    """It is a standard tar of plain files, without an owner and without facts of this machine."""
    members = members_of(bundle_bytes(store))
    infos = [member.info for member in members]
    assert infos[0].name == "bundle.json"
    assert {(info.type, info.mode, info.uid, info.mtime) for info in infos} == {
        (tarfile.REGTYPE, 0o644, 0, 0)
    }
    index = members[0].content.decode()
    assert os.uname().nodename not in index
    assert str(store.root) not in index


def test_progress_ends_at_the_total(store: KernelStore) -> None:
    """Progress is reported after each entry."""
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
    """The error names the entry, whichever file is damaged, and the old bundle stays."""
    target = out(tmp_path) / "kernels.tar.gz"
    target.write_bytes(b"the old one")
    folder = entry_folder(tmp_path, key_for(FAMILIES[0]))
    if fault == "changed":
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content.replace(b"1", b"2") + b" ")
    else:
        (folder / name).unlink()

    with pytest.raises(BundleError, match=rf"^bundle: expected a valid entry, .*{name}") as caught:
        export_bundle(list(store.entries()), target)

    assert caught.value.path == folder
    assert target.read_bytes() == b"the old one"
    assert tree(target.parent) == [target.name]


def test_a_kernel_that_is_no_elf_file_stops_the_export(tmp_path: Path) -> None:
    """An entry that import rejects is not exported."""
    store = make_store(tmp_path)
    build = make_build(b"#!/bin/sh\n")
    publish(Layout(store.root), Manifest.of(key_for("x"), build, created_by="jit"), build.files)
    with pytest.raises(BundleError, match=r"kernel.cubin: expected an ELF file, got"):
        bundle_bytes(store)


def test_an_existing_bundle_is_replaced(store: KernelStore, tmp_path: Path) -> None:
    """An existing bundle is replaced, and no other file stays in the folder."""
    target = out(tmp_path) / "kernels.tar.gz"
    target.write_bytes(b"the old one")
    export_bundle(list(store.entries()), target)
    assert target.read_bytes() == bundle_bytes(store)
    assert tree(target.parent) == [target.name]


@pytest.mark.parametrize("is_new", [True, False], ids=["dangling", "of an old bundle"])
def test_a_link_stays(is_new: bool, store: KernelStore, tmp_path: Path) -> None:
    """The bundle is written to where a link leads, and the link remains one."""
    place = out(tmp_path) / "kernels.tar.gz"
    link = tmp_path / "latest.tar.gz"
    link.symlink_to(place.relative_to(tmp_path))
    if not is_new:
        place.write_bytes(b"the old one")
    export_bundle(list(store.entries()), link)
    assert link.readlink() == place.relative_to(tmp_path)
    assert place.read_bytes() == bundle_bytes(store)
    assert tree(place.parent) == [place.name]


LINKS = {"latest": "a link to itself", "fifo": "a link to a FIFO"}


@pytest.mark.parametrize("leads_to", LINKS, ids=LINKS.get)
def test_a_link_without_a_file_is_not_replaced(
    leads_to: str, store: KernelStore, tmp_path: Path
) -> None:
    """A link that leads to no regular file is rejected in one line, and stays."""
    folder = out(tmp_path)
    os.mkfifo(folder / "fifo")
    link = folder / "latest"
    link.symlink_to(leads_to)
    for write in (require_target, lambda path: export_bundle(list(store.entries()), path)):
        with pytest.raises(BundleError, match=f"^bundle: expected a .*file, got .*: {link}$"):
            write(link)
    assert link.is_symlink()
    assert tree(folder) == ["fifo", "latest"]


@pytest.mark.parametrize("name", ["k" * 255, "\N{GREEK SMALL LETTER KAPPA}" * 127])
def test_a_name_of_any_length_that_the_disk_takes_is_written(
    name: str, store: KernelStore, tmp_path: Path
) -> None:
    """The temporary file has a short name of its own."""
    target = out(tmp_path) / name
    require_target(target)
    export_bundle(list(store.entries()), target)
    assert tree(target.parent) == [name]


def test_a_folder_that_cannot_be_written_is_rejected_before_the_work(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """The error names the target and leaves nothing."""
    target = out(tmp_path) / "kernels.tar.gz"
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(BundleError, match=f"writable file, got Permission denied: {target}$"):
        require_target(target)
    assert tree(target.parent) == []


@pytest.mark.parametrize("umask", [0o022, 0o077], ids="{:03o}".format)
def test_a_bundle_has_the_mode_of_the_umask(umask: int, store: KernelStore, tmp_path: Path) -> None:
    """A bundle has the mode of the umask, unlike the private files of the cache."""
    target = out(tmp_path) / "kernels.tar.gz"
    before = os.umask(umask)
    try:
        export_bundle(list(store.entries()), target)
    finally:
        os.umask(before)
    assert target.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("target", ["", ".", "/", ".."], ids=repr)
def test_a_folder_is_not_replaced(target: str, store: KernelStore, tmp_path: Path) -> None:
    """A target that is not a file or has no name is rejected, and nothing is written."""
    folder = out(tmp_path)
    with pytest.raises(BundleError, match="expected a file, got another kind"):
        export_bundle(list(store.entries()), Path(target) if target else folder)
    assert tree(folder) == []


def test_more_entries_than_can_be_imported_are_rejected(
    store: KernelStore, tmp_path: Path, monkeypatch: Patch
) -> None:
    """An oversized table of contents is rejected, and no file remains."""
    monkeypatch.setattr(bundle_writing, "INDEX_MAX_BYTES", 1000)
    folder = out(tmp_path)
    with pytest.raises(BundleError, match=r"contents of at most 1000 bytes, got 1[0-9]{3}; export"):
        export_bundle(list(store.entries()), folder / "kernels.tar.gz")
    assert tree(folder) == []


def test_a_missing_folder_is_not_made(store: KernelStore, tmp_path: Path) -> None:
    """A missing parent folder is an error."""
    target = tmp_path / "nowhere" / "kernels.tar.gz"
    with pytest.raises(BundleError, match=f"expected a file in a folder that exists, got {target}"):
        export_bundle(list(store.entries()), target)
    assert not target.parent.exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_leaves_nothing(
    code: int, store: KernelStore, tmp_path: Path, monkeypatch: Patch
) -> None:
    """A partial bundle never has the final name, and is deleted."""
    target = out(tmp_path) / "kernels.tar.gz"
    monkeypatch.setattr(os, "fsync", failing(code))
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
