"""A cache folder: its trust, reads of anything, publication, deletion, and its open descriptor."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mlagen.cache.file import DamageError
from mlagen.cache.folder import Folder, Opened, identity_of
from mlagen.cache.trust import UntrustedError
from tests.cache.builds import (
    entry_path,
    failing,
    make_build,
    make_file,
    make_key,
    make_store,
    tree,
)
from tests.faults.strangers import FOLDERS, folder_of
from tests.fixture_types import Patch

KEY = make_key()
FILE = make_file()
PLACE = f"v2/{KEY.digest[:2]}/{KEY.digest}.{KEY.toolchain}"
NAME = PLACE.rpartition("/")[2]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Return a folder with one entry."""
    make_store(tmp_path).find_or_build(KEY, make_build)
    return Folder(tmp_path / "cache")


def publish(folder: Folder, content: bytes = FILE) -> bool:
    """Publish an entry of ``KEY``."""
    return folder.publish(KEY.digest, KEY.toolchain, content, then=lambda _: None)


def read(folder: Folder, name: str = NAME) -> bytes:
    """Read a file beside the entry."""
    with folder.shard(KEY.digest) as shard:
        return shard.read(name)[0]


def test_publishing_creates_the_entry_and_nothing_else(tmp_path: Path) -> None:
    """One file appears in the folder of its first digits, and the cache has its tag."""
    assert publish(Folder(tmp_path))
    assert tree(tmp_path) == ["v2", PLACE.rpartition("/")[0], PLACE, "v2/CACHEDIR.TAG"]
    tag = (tmp_path / "v2/CACHEDIR.TAG").read_text(encoding="ascii")
    assert tag.startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
    assert (tmp_path / PLACE).read_bytes() == FILE


NO_LINKS = [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES]


@pytest.mark.parametrize("code", [None, *NO_LINKS], ids=str)
def test_the_first_entry_stays(code: int | None, tmp_path: Path, monkeypatch: Patch) -> None:
    """Also on file systems without hard links, and nothing is left over."""
    if code is not None:
        monkeypatch.setattr(os, "link", failing(code))
    folder = Folder(tmp_path)
    assert [publish(folder), publish(folder, b"another")] == [True, False]
    assert (tmp_path / PLACE).read_bytes() == FILE
    assert len(tree(tmp_path)) == 4


@pytest.mark.parametrize(
    "code", [errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EIO], ids=errno.errorcode.__getitem__
)
def test_a_folder_that_cannot_be_flushed_keeps_its_entries(
    code: int, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Files are flushed before they have their name; not every file system flushes folders."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112 - of a descriptor
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert publish(Folder(tmp_path))
    assert read(Folder(tmp_path)) == FILE


def test_a_read_only_folder_is_rejected_before_any_write(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """A read-only folder is an OSError that names it."""
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with pytest.raises(PermissionError, match="v2"):
        Folder(tmp_path).require_writable()


def _symbolic_link(path: Path) -> None:
    (path.parent / "target").write_bytes(FILE)
    path.symlink_to(path.parent / "target")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(path.parent, os.O_RDONLY)  # the path of a socket must be short
        server.bind(f"/proc/self/fd/{folder}/s")
        (path.parent / "s").rename(path)
        os.close(folder)


def _endless(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


NOT_FILES: dict[str, Callable[[Path], object]] = {
    "a symbolic link": _symbolic_link,
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a folder": Path.mkdir,
    "a FIFO without a writer": os.mkfifo,
    "a socket": _socket,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a file that is too long": _endless,
}


@pytest.mark.timeout(5)
@pytest.mark.parametrize("make", NOT_FILES.values(), ids=NOT_FILES)
def test_a_read_rejects_anything_else(
    make: Callable[[Path], object], folder: Folder, tmp_path: Path
) -> None:
    """Only regular files of a limited size are read; anything else is damage, without blocking."""
    path = entry_path(tmp_path, KEY)
    path.unlink()
    make(path)
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - descriptors
    for start_only in (False, True):
        with folder.shard(KEY.digest) as shard, pytest.raises(DamageError, match=r"^expected "):
            shard.read(NAME, start_only=start_only)
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # noqa: PTH208 - the open folder


def test_a_missing_entry_is_not_damaged(folder: Folder) -> None:
    """It is absent."""
    with pytest.raises(FileNotFoundError):
        read(folder, "0" * 64 + ".nvrtc-13")
    with pytest.raises(FileNotFoundError):
        folder.shard("f" * 64 if KEY.digest[0] != "f" else "0" * 64)


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o2755], ids="{:04o}".format)
@pytest.mark.parametrize("place", FOLDERS)
def test_a_folder_that_others_may_read_is_trusted(
    place: str, mode: int, folder: Folder, tmp_path: Path
) -> None:
    """Read permission for other users is accepted."""
    folder_of(tmp_path, place).chmod(mode)
    assert read(folder) != b""


def test_a_folder_of_root_is_trusted(folder: Folder, monkeypatch: Patch) -> None:
    """Folders of root are trusted; a user other than the owner is rejected."""
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    if os.getuid() == 0:
        assert read(folder) != b""
    else:
        with pytest.raises(PermissionError, match=f"a folder of user {os.getuid()}"):
            read(folder)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, None], ids=str)
def test_a_file_that_others_may_change_is_not_read(
    mode: int | None, folder: Folder, tmp_path: Path
) -> None:
    """The check uses the status of the opened file, and the error names it."""
    file = entry_path(tmp_path, KEY)
    if mode is None and os.geteuid() != 0:
        pytest.skip("needs root, to give a file away")
    if mode is None:
        os.chown(file, 65534, -1)
        expected = f"a file of user 65534 at {file} "
    else:
        file.chmod(mode)
        expected = f"mode {mode:04o}, which lets others write, at {file} "
    with pytest.raises(UntrustedError, match=expected):
        read(folder)
    assert read(Folder(folder.root, is_shared=True)) != b""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a link away")
def test_a_link_to_the_root_must_be_own(folder: Folder, tmp_path: Path) -> None:
    """A link to the root by another user is rejected, unless the cache is shared."""
    link = tmp_path / "link"
    link.symlink_to(folder.root)
    os.chown(link, 65534, -1, follow_symlinks=False)
    with pytest.raises(PermissionError, match=f"a symbolic link of user 65534 at {link} "):
        read(Folder(link))
    assert read(Folder(link, is_shared=True)) != b""


def test_removal_deletes_the_file_that_was_seen(folder: Folder, tmp_path: Path) -> None:
    """A process that finds damage late does not delete what another one has put there."""
    path = entry_path(tmp_path, KEY)
    seen = identity_of(path.stat())
    path.unlink()
    path.write_bytes(FILE)
    assert not folder.remove(KEY.digest, KEY.toolchain, seen=seen)
    assert path.exists()
    assert folder.remove(KEY.digest, KEY.toolchain, seen=identity_of(path.stat()))
    assert not folder.remove(KEY.digest, KEY.toolchain)
    assert tree(path.parent) == []


def test_removal_does_not_follow_a_link(folder: Folder, tmp_path: Path) -> None:
    """The link is removed, its target stays; a folder is not removed."""
    (tmp_path / "precious").write_bytes(FILE)
    path = entry_path(tmp_path, KEY)
    path.unlink()
    path.symlink_to(tmp_path / "precious")
    assert folder.remove(KEY.digest, KEY.toolchain)
    (path / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match=r"directory|permitted"):
        folder.remove(KEY.digest, KEY.toolchain)
    assert (tmp_path / "precious").exists()
    assert tree(path) == ["inside"]


@pytest.mark.parametrize(
    ("name", "age_s", "is_swept"),
    [
        (f".{'a' * 16}.part", 4000, True),
        (f".{'a' * 16}.part", -90_000, True),
        (f".{'a' * 16}.part", 60, False),
        (".nfs0001", 4000, False),
        ("notes.txt", 4000, False),
    ],
    ids=["old", "of a clock that was set back", "young", "of the system", "of the user"],
)
def test_a_sweep_deletes_abandoned_files_only(
    name: str, age_s: int, is_swept: bool, folder: Folder, tmp_path: Path
) -> None:
    """A temporary file is abandoned after an hour; what mlagen did not write stays."""
    path = entry_path(tmp_path, KEY).with_name(name)
    path.touch()
    os.utime(path, (time.time() - age_s,) * 2)
    with folder.shard(KEY.digest) as shard:
        assert shard.sweep() == [0] * is_swept
    assert path.exists() is not is_swept
    assert entry_path(tmp_path, KEY).exists()


def test_the_folder_is_opened_once(folder: Folder, monkeypatch: Patch) -> None:
    """Later accesses start at the open folder."""
    read(folder)
    opened: list[object] = []
    real = os.open

    def open_(path: str, *args: int, **kwargs: int) -> int:
        opened.append(path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    read(folder)
    assert opened == [KEY.digest[:2], NAME]


def test_a_descriptor_that_another_part_of_the_process_closed_is_not_used(
    folder: Folder, tmp_path: Path
) -> None:
    """A daemon closes all descriptors, and another folder may get the number."""
    assert read(folder) != b""
    (number,) = _numbers_of(tmp_path / "cache/v2")
    (tmp_path / "planted" / KEY.digest[:2]).mkdir(parents=True)
    (tmp_path / "planted" / PLACE.partition("/")[2]).write_bytes(b"planted")
    planted = os.open(tmp_path / "planted", os.O_RDONLY)
    os.dup2(planted, number)
    try:
        assert read(folder) != b"planted"
        os.fstat(number)  # and it is not closed
    finally:
        os.close(planted)
        os.close(number)


def _numbers_of(path: Path) -> list[int]:
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += [int(each.name)] if each.readlink() == path else []
    return found


def _deleted(cache: Path) -> None:
    shutil.rmtree(cache)


def _exchanged(cache: Path) -> None:
    cache.rename(cache.with_name("aside"))
    publish(Folder(cache), b"new")


@pytest.mark.parametrize("change", [_deleted, _exchanged])
def test_a_folder_that_was_replaced_is_opened_again(
    change: Callable[[Path], None], folder: Folder, tmp_path: Path
) -> None:
    """A miss, a listing and a publication notice it; the old descriptor is closed."""
    read(folder)
    change(tmp_path / "cache")
    assert folder.has_moved() is (change is _exchanged)
    publish(folder, b"new")
    assert not folder.has_moved()
    assert read(folder) == entry_path(tmp_path, KEY).read_bytes() == b"new"
    assert len(_numbers_of(tmp_path / "cache/v2")) == 1


def test_a_folder_that_becomes_open_to_others_is_not_used_any_more(
    folder: Folder, tmp_path: Path
) -> None:
    """The open folder is checked at every access."""
    read(folder)
    (tmp_path / "cache/v2").chmod(0o777)
    with pytest.raises(UntrustedError, match="mode 0777"):
        read(folder)


def old_layout(root: Path) -> Path:
    """Fill a folder of the first layout."""
    entry = root / "v1/e/ab" / ("ab" * 32) / "nvrtc-13.5.37"
    entry.mkdir(parents=True, mode=0o700)
    (entry / "kernel.cubin").write_bytes(bytes(1000))
    (root / "v1/quarantine").symlink_to(root.parent / "precious")
    return root / "v1"


def test_old_layouts_are_removed_on_request(folder: Folder, tmp_path: Path) -> None:
    """Links in it are not followed, and the present layout stays."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").touch()
    old = old_layout(folder.root)
    assert folder.remove_old_layouts(dry_run=True) >= 1000
    assert old.exists()
    assert folder.remove_old_layouts() >= 1000
    assert folder.remove_old_layouts() == 0
    assert not old.exists()
    assert tree(tmp_path / "precious") == ["file"]
    assert read(folder) != b""


@pytest.mark.parametrize("kind", ["a link", "open to all"])
def test_an_old_layout_that_is_not_trusted_stays(kind: str, folder: Folder, tmp_path: Path) -> None:
    """Nothing behind it is deleted."""
    old = old_layout(tmp_path / "elsewhere")
    if kind == "a link":
        (folder.root / "v1").symlink_to(old)
    else:
        old.rename(folder.root / "v1")
        (folder.root / "v1").chmod(0o777)
    before = tree(tmp_path)
    with pytest.raises(UntrustedError):
        folder.remove_old_layouts()
    assert tree(tmp_path) == before


def test_an_old_layout_of_endless_depth_ends_in_an_error(folder: Folder) -> None:
    """Where other users are trusted, they may nest folders deeper than a program can follow."""
    descriptor = os.open(folder.root, os.O_RDONLY)
    for name in ("v1", *("d" for _ in range(1500))):
        os.mkdir(name, 0o700, dir_fd=descriptor)
        inner = os.open(name, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    with pytest.raises(OSError, match="nested deeper"):
        folder.remove_old_layouts()
    subprocess.run(["/bin/rm", "-rf", str(folder.root / "v1")], check=True)  # pytest cannot


def test_an_error_of_a_write_leaves_nothing(folder: Folder, monkeypatch: Patch) -> None:
    """A network file system may report a failed write when the file is closed."""
    real = os.close

    def close(descriptor: int) -> None:
        is_part = ".part" in os.fspath(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)
        if is_part:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    before = tree(folder.root)
    monkeypatch.setattr(os, "close", close)
    with pytest.raises(OSError, match="quota"):
        publish(folder)
    monkeypatch.undo()
    assert tree(folder.root) == before
    assert isinstance(folder.shard(KEY.digest), Opened)
