"""Remote files: atomic transfers, and one-line errors."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import pytest

from cache_tools.tools.remote import RemoteError, download, redacted, upload
from mlagen.errors import ArgumentError, MlagenError, UnsupportedError
from tests.fixture_types import Patch

from .conftest import Serve

CONTENT = bytes(range(256)) * 10_000  # 2.5 MB, three chunks


@pytest.fixture(params=["file://", "", "memory://"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a URL without a file."""
    return f"{request.param}{tmp_path}/kernels.tar.gz"


def quiet(_done: int, _total: int) -> None:
    """Ignore progress."""


def fetched(url: str) -> bytes:
    """Return the bytes at a URL."""
    file = io.BytesIO()
    download(url, file, 1 << 30, quiet)
    return file.getvalue()


def require_error(url: str, message: str, max_bytes: int = 1 << 30) -> None:
    """Require that a download fails with one line, after at most the first chunks."""
    file = io.BytesIO()
    with pytest.raises(RemoteError, match=rf"^url: .*{message}") as caught:
        download(url, file, max_bytes, quiet)
    assert "\n" not in str(caught.value)
    assert len(file.getvalue()) <= max_bytes


def test_an_upload_can_be_downloaded(url: str) -> None:
    """The whole file is uploaded from its start, replaces an old one, and progress ends at it."""
    seen: list[tuple[int, int]] = []
    file, received = io.BytesIO(CONTENT), io.BytesIO()
    file.seek(100)

    upload(io.BytesIO(b"old"), 3, url, quiet)
    upload(file, len(CONTENT), url, lambda *done: seen.append(done))
    download(url, received, 1 << 30, lambda *done: seen.append(done))

    assert received.getvalue() == CONTENT
    assert [done for done, _ in seen] == [1 << 20, 2 << 20, len(CONTENT)] * 2
    assert {total for _, total in seen} == {len(CONTENT)}


def test_a_partial_upload_is_never_visible(url: str) -> None:
    """The name appears after the last byte; a failure leaves no file."""
    fs, path = fsspec.core.url_to_fs(url)

    def stop(done: int, total: int) -> None:
        assert (done, total, fs.exists(path)) == (1 << 20, len(CONTENT), False)
        raise RuntimeError("the wire was cut")

    with pytest.raises(RemoteError, match=r"^url: the wire was cut: "):
        upload(io.BytesIO(CONTENT), len(CONTENT), url, stop)
    assert not fs.exists(path)


def test_a_caching_file_system_is_not_local(tmp_path: Path, monkeypatch: Patch) -> None:
    """A caching file system of fsspec writes to the remote one."""
    url = f"memory://{tmp_path}/kernels.tar.gz"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    upload(io.BytesIO(CONTENT), len(CONTENT), f"simplecache::{url}", quiet)
    assert fetched(url) == CONTENT
    assert not (tmp_path / "kernels.tar.gz").exists()


def test_a_local_upload_is_renamed_into_place(tmp_path: Path) -> None:
    """The file is written in the target's folder and renamed, without a copy elsewhere."""
    names = []
    url = f"file://{tmp_path}/kernels.tar.gz"
    upload(io.BytesIO(CONTENT), len(CONTENT), url, lambda *_: names.append([*tmp_path.iterdir()]))
    assert [len(each) for each in names] == [1, 1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["kernels.tar.gz"]


def test_what_is_missing_or_too_large_is_one_line(url: str) -> None:
    """An endless response does not fill the disk, and any exception becomes one line."""
    require_error(url, ".+")
    upload(io.BytesIO(CONTENT), len(CONTENT), url, quiet)
    require_error(url, "expected at most 1000 bytes, got more", 1000)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("prefix", ["file://", ""])
def test_a_local_fifo_is_not_waited_for(prefix: str, tmp_path: Path) -> None:
    """A local path is read only if it is a regular file."""
    os.mkfifo(tmp_path / "fifo")
    require_error(f"{prefix}{tmp_path}/fifo", "a FIFO")


def test_http_is_read_without_a_package(tmp_path: Path, serve: Serve) -> None:
    """Python's own client reads http, up to the limit; errors are the server's, on one line.

    A broken connection is not the end of the file.
    """
    (tmp_path / "kernels.tar.gz").write_bytes(CONTENT)
    seen: list[tuple[int, int]] = []
    file = io.BytesIO()

    with serve(tmp_path) as server:
        download(f"{server}/kernels.tar.gz", file, 1 << 30, lambda *done: seen.append(done))
        require_error(f"{server}/missing.tar.gz", "HTTP Error 404: File not found: http://127")
        require_error(f"{server}/kernels.tar.gz", "expected at most 2000000 ", 2_000_000)
    require_error(f"{server}/k", f"Connection refused.*: {server}/k$")
    with serve(tmp_path, cuts_short=True) as server:
        cut = f"expected {len(CONTENT) + 100} bytes, got {len(CONTENT)}"
        require_error(f"{server}/kernels.tar.gz", cut)

    assert file.getvalue() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))


@pytest.mark.parametrize("scheme", ["http", "https", "HTTP"])
def test_http_is_not_written(scheme: str) -> None:
    """An upload to http fails before any byte is sent."""
    with pytest.raises(ArgumentError, match=r"^url: expected one that can be written, got "):
        upload(io.BytesIO(CONTENT), len(CONTENT), f"{scheme}://127.0.0.1:9/x", quiet)


def test_a_protocol_without_a_package_is_named(monkeypatch: Patch, tmp_path: Path) -> None:
    """An unknown protocol is bad usage; without fsspec only http works."""
    fsspec.register_implementation("mlagentest", "mlagen_absent.Files", errtxt="Install it")
    rule = "^url: expected a package for mlagentest://, got none; run: pip install mlagen_absent$"

    with pytest.raises(ArgumentError, match="expected a protocol that fsspec knows, got 's4'"):
        fetched("s4://bucket/kernels.tar.gz")
    with pytest.raises(UnsupportedError, match=rule):
        fetched("mlagentest://bucket/kernels.tar.gz")
    for name in ("fsspec", "fsspec.core"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match=r"; run: pip install fsspec$"):
        fetched(f"file://{tmp_path}/kernels.tar.gz")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/kernels.tar.gz", "s3://bucket/kernels.tar.gz"),
        ("sftp://me:secret@host/kernels.tar.gz", "sftp://host/kernels.tar.gz"),
        ("https://host/kernels.tar.gz?X-Amz-Signature=secret", "https://host/kernels.tar.gz"),
    ],
)
def test_secrets_are_not_shown(url: str, expected: str, monkeypatch: Patch) -> None:
    """Neither printed URLs nor a file system's messages have a password or a signed query."""

    def fail(given: str) -> Any:
        raise RuntimeError(f"cannot reach\n{given}")

    monkeypatch.setattr("cache_tools.tools.remote._resolve", fail)
    writable = url.replace("https:", "memory:")
    shown = expected.replace("https:", "memory:")

    assert redacted(url) == expected
    for transfer in (lambda: upload(io.BytesIO(), 0, writable, quiet), lambda: fetched(writable)):
        with pytest.raises(MlagenError) as caught:
            transfer()
        assert str(caught.value) == f"url: cannot reach {shown}: {shown}"
