"""Reads and writes of single files: regular files only, and never blocking."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.cache import files
from mlagen.cache.files import DamageError


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
def test_a_read_rejects_anything_else(make: Callable[[Path], object], tmp_path: Path) -> None:
    """Only regular files within the limit are read; anything else is damage, without blocking."""
    path = tmp_path / "kernel.cubin"
    make(path)
    open_before = _descriptors()
    with pytest.raises(DamageError, match=r"^kernel\.cubin: expected "):
        files.read_with_status(path, max_bytes=4)
    assert _descriptors() == open_before


@pytest.mark.parametrize("content", [b"", b"123", b"1234"], ids=["empty", "short", "at the limit"])
def test_a_read_returns_the_content(content: bytes, tmp_path: Path) -> None:
    """A regular file up to the limit is read completely."""
    path = tmp_path / "file"
    path.write_bytes(content)
    assert files.read_with_status(path, max_bytes=4)[0] == content
