"""User paths: queries never raise, reads and appends never block."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.models.config import find_model
from mlagen.paths import (
    MAX_NAMED_BYTES,
    append_named,
    folder_problem,
    is_folder,
    is_regular,
    read_named,
)
from mlagen.prewarming.files import read_input_file
from tests.cache.builds import failing

CODES = [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT, errno.ENAMETOOLONG, errno.ELOOP]


def make_socket(path: Path) -> None:
    """Create a socket at a path."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))  # a socket's path has a short limit


OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a FIFO": (os.mkfifo, "a FIFO"),
    "a socket": (make_socket, "a socket"),
    "a folder": (Path.mkdir, "Is a directory"),
    "an endless device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "a device without content": (lambda path: path.symlink_to("/dev/null"), "a device"),
}


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.__getitem__)
def test_a_failing_query_is_no_folder(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the file system is a reason, not an exception."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", failing(code))
        found = folder_problem(tmp_path), is_folder(tmp_path), is_regular(tmp_path)
    assert found == (os.strerror(code), False, False)


def test_path_problems_are_distinguished(tmp_path: Path) -> None:
    """A folder has no problem; a missing path, a file and a null character have one each."""
    (tmp_path / "file").touch()
    assert folder_problem(tmp_path) is None
    assert folder_problem(tmp_path / "nowhere") == "none"
    assert folder_problem(tmp_path / "file") == "none"
    assert folder_problem(tmp_path / "file/below") == "none"
    assert "null" in (folder_problem(Path("a\0b")) or "")
    assert (is_regular(tmp_path / "file"), is_regular(tmp_path)) == (True, False)


@pytest.mark.timeout(10)
@pytest.mark.parametrize(("make", "kind"), OTHERS.values(), ids=OTHERS)
def test_only_a_regular_file_is_opened(
    make: Callable[[Path], object], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads and appends open neither a FIFO nor a device nor a socket."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "it")

    def reject(*_: object, **__: object) -> None:
        raise AssertionError("opened")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", reject)
        for use in (read_named, lambda path: append_named(path, b"line\n")):
            with pytest.raises(OSError, match=kind):
                use(tmp_path / "it")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """A file above the limit is not loaded into memory."""
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", MAX_NAMED_BYTES + 1)
    with pytest.raises(OSError, match="more than 64 MiB"):
        read_named(tmp_path / "large")


def test_a_file_is_read_and_appended_to(tmp_path: Path) -> None:
    """An append creates the file, and follows a link."""
    (tmp_path / "link").symlink_to("file")
    for line in (b"one\n", b"two\n"):
        append_named(tmp_path / "link", line)
    assert read_named(tmp_path / "file") == b"one\ntwo\n"


@pytest.mark.parametrize("code", [None, errno.ENOSPC])
def test_a_short_write_is_finished_or_raises(
    code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full takes a part of a line, which no caller takes for success."""
    write = os.write
    lengths: list[int] = []

    def part(descriptor: int, content: bytes) -> int:
        if lengths and code is not None:
            raise OSError(code, os.strerror(code))
        lengths.append(len(content))
        return write(descriptor, content[:3])

    monkeypatch.setattr(os, "write", part)
    if code is None:
        append_named(tmp_path / "file", b"a line\n")
        assert (tmp_path / "file").read_bytes() == b"a line\n"
    else:
        with pytest.raises(OSError, match=os.strerror(code)):
            append_named(tmp_path / "file", b"a line\n")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("read", [lambda path: find_model(str(path)), read_input_file])
def test_an_argument_that_names_a_fifo_is_rejected(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    """Models, records and tables share one reader, and each rejection is one line."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match=r"expected a readable .*, got a FIFO"):
        read(tmp_path / "fifo")
