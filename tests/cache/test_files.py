"""Reads and writes of single files: regular files only, and never blocking."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.cache import files
from mlagen.cache.files import DamageError
from tests.cache.builds import Patch, failing


def _symbolic_link(path: Path) -> None:
    (path.parent / "target").write_bytes(b"1234")  # within the limit
    path.symlink_to(path.parent / "target")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(path.parent, os.O_RDONLY)  # the path of a socket must be short
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


NOT_FILES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: path,
    "a symbolic link": _symbolic_link,
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a folder": Path.mkdir,
    "a FIFO without a writer": os.mkfifo,
    "a socket": _socket,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a file that is too long": lambda path: path.write_bytes(b"12345"),
}


def _descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.mark.timeout(5)
@pytest.mark.parametrize("make", NOT_FILES.values(), ids=NOT_FILES)
def test_read_regular_rejects_anything_else(make: Callable[[Path], object], tmp_path: Path) -> None:
    """Only regular files within the limit are read; anything else is damage, without blocking."""
    path = tmp_path / "kernel.cubin"
    make(path)
    open_before = _descriptors()

    with pytest.raises(DamageError, match=r"^kernel\.cubin: expected "):
        files.read_regular(path, max_bytes=4)

    assert _descriptors() == open_before


@pytest.mark.parametrize("content", [b"", b"123", b"1234"], ids=["empty", "short", "at the limit"])
def test_read_regular_returns_the_content(content: bytes, tmp_path: Path) -> None:
    """A regular file up to the limit is read completely."""
    path = tmp_path / "file"
    path.write_bytes(content)

    assert files.read_regular(path, max_bytes=4) == content


def test_failure_to_read_is_not_damage(tmp_path: Path, monkeypatch: Patch) -> None:
    """Running out of file descriptors is not damage of the file."""
    monkeypatch.setattr(os, "open", failing(errno.EMFILE))

    with pytest.raises(OSError, match="Too many open files"):
        files.read_regular(tmp_path / "file", max_bytes=4)


@pytest.mark.parametrize("occupant", ["a file", "a link"])
def test_write_new_never_overwrites(occupant: str, tmp_path: Path) -> None:
    """An existing file stays, and a link is not followed."""
    path, target = tmp_path / "file", tmp_path / "target"
    target.write_bytes(b"original")
    if occupant == "a file":
        path.write_bytes(b"original")
    else:
        path.symlink_to(target)

    with pytest.raises(FileExistsError):
        files.write_new(path, b"written")

    assert path.read_bytes() == target.read_bytes() == b"original"


@pytest.mark.parametrize("umask", [0o000, 0o027, 0o077], ids="{:03o}".format)
def test_new_files_and_folders_are_private(umask: int, tmp_path: Path) -> None:
    """Folders are 0700 and files 0600 on every level, whatever the umask."""
    before = os.umask(umask)
    try:
        files.make_folder(tmp_path / "a/b/c")
        files.write_new(tmp_path / "a/b/c/file", b"content")
    finally:
        os.umask(before)

    modes = [
        (tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/c", "a/b/c/file")
    ]
    assert modes == [0o700, 0o700, 0o700, 0o600]


@pytest.mark.parametrize("blocker", ["a file", "a dangling link"])
@pytest.mark.parametrize("below", ["", "deeper/still"], ids=["in its place", "below it"])
def test_make_folder_fails_if_a_file_is_in_the_way(
    blocker: str, below: str, tmp_path: Path
) -> None:
    """A file or a dangling link in the way is an OSError, not an endless loop."""
    path = tmp_path / "blocked"
    if blocker == "a file":
        path.touch()
    else:
        path.symlink_to("nowhere")

    with pytest.raises(OSError, match="blocked"):
        files.make_folder(path / below)


def test_identity_changes_when_a_folder_is_replaced(tmp_path: Path) -> None:
    """A path has the identity of its current folder, or None."""
    (tmp_path / "a").mkdir()
    before = files.identity_of(tmp_path / "a")

    (tmp_path / "a").rename(tmp_path / "b")
    absent = files.identity_of(tmp_path / "a")
    (tmp_path / "a").mkdir()

    assert absent is None
    assert files.identity_of(tmp_path / "a") not in (None, before)
    assert files.identity_of(tmp_path / "b") == before
    assert files.identity_of(tmp_path / "a/b/c") is None
