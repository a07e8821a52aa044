"""Remote files: atomic transfers, and one-line errors."""

from __future__ import annotations

import io
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import pytest

from cache_tools.tools.remote import RemoteError, download, redacted, upload
from mlagen.errors import ArgumentError, MlagenError, UnsupportedError

from .web import served

CONTENT = bytes(range(256)) * 10_000  # 2.5 MB, three chunks


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bypass proxies for servers of this machine."""
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture(params=["file", "plain path", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a URL without a file."""
    if request.param == "memory":
        return f"memory://{tmp_path}/kernels.tar.gz"
    prefix = "file://" if request.param == "file" else ""
    return f"{prefix}{tmp_path}/kernels.tar.gz"


def quiet(_done: int, _total: int) -> None:
    """Ignore progress."""


def exists(url: str) -> bool:
    """Whether a URL has a file."""
    fs, path = fsspec.core.url_to_fs(url)
    return bool(fs.exists(path))


def fetched(url: str, max_bytes: int = 1 << 30) -> bytes:
    """Return the bytes at a URL."""
    file = io.BytesIO()
    download(url, file, max_bytes, quiet)
    return file.getvalue()


def test_an_upload_can_be_downloaded(url: str) -> None:
    """The whole file is uploaded from its start, and replaces an old one."""
    file = io.BytesIO(CONTENT)
    file.seek(100)

    upload(io.BytesIO(b"old"), 3, url, quiet)
    upload(file, len(CONTENT), url, quiet)

    assert fetched(url) == CONTENT


def test_a_partial_upload_is_never_visible(url: str) -> None:
    """The name appears after the last byte; a failure leaves no file."""
    seen = []

    def stop(done: int, total: int) -> None:
        seen.append(exists(url))
        assert (done, total) == (1 << 20, len(CONTENT))
        raise RuntimeError("the wire was cut")

    with pytest.raises(RemoteError, match=r"^url: the wire was cut: "):
        upload(io.BytesIO(CONTENT), len(CONTENT), url, stop)

    assert seen == [False]
    assert not exists(url)


def test_a_caching_file_system_is_not_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caching file system of fsspec writes to the remote one."""
    url = f"memory://{tmp_path}/kernels.tar.gz"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    upload(io.BytesIO(CONTENT), len(CONTENT), f"simplecache::{url}", quiet)

    assert fetched(url) == CONTENT
    assert not (tmp_path / "kernels.tar.gz").exists()


def test_a_local_upload_is_renamed_into_place(tmp_path: Path) -> None:
    """The file is written in the target's folder and renamed, without a copy elsewhere."""
    names = []

    def look(_done: int, _total: int) -> None:
        names.append(len(list(tmp_path.iterdir())))

    upload(io.BytesIO(CONTENT), len(CONTENT), f"file://{tmp_path}/kernels.tar.gz", look)

    assert names == [1, 1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["kernels.tar.gz"]


def test_progress_ends_at_the_size(url: str) -> None:
    """Both directions end at the size, if it is known."""
    seen: list[tuple[int, int]] = []

    upload(io.BytesIO(CONTENT), len(CONTENT), url, lambda *done: seen.append(done))
    download(url, io.BytesIO(), 1 << 30, lambda *done: seen.append(done))

    assert [done for done, _ in seen] == [1 << 20, 2 << 20, len(CONTENT)] * 2
    assert {total for _, total in seen} == {len(CONTENT)}


def test_a_download_stops_at_its_limit(url: str) -> None:
    """An endless response does not fill the disk."""
    upload(io.BytesIO(CONTENT), len(CONTENT), url, quiet)
    file = io.BytesIO()

    with pytest.raises(RemoteError, match="expected at most 1000 bytes, got more"):
        download(url, file, 1000, quiet)

    assert file.getvalue() == b""


def test_a_declared_size_above_the_limit_is_not_downloaded(tmp_path: Path) -> None:
    """A declared size above the limit fails before the download."""
    (tmp_path / "kernels.tar.gz").write_bytes(CONTENT)
    file = io.BytesIO()

    with served(tmp_path) as server, pytest.raises(RemoteError, match="expected at most 2000000 "):
        download(f"{server}/kernels.tar.gz", file, 2_000_000, quiet)

    assert file.getvalue() == b""


def test_a_missing_file_is_one_line(url: str) -> None:
    """Any exception of the file system becomes one line."""
    with pytest.raises(RemoteError, match=r"^url: .+") as caught:
        fetched(url)

    assert "\n" not in str(caught.value)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("prefix", ["file://", ""])
def test_a_local_fifo_is_not_waited_for(prefix: str, tmp_path: Path) -> None:
    """A local path is read only if it is a regular file."""
    os.mkfifo(tmp_path / "fifo")

    with pytest.raises(RemoteError, match="a FIFO"):
        fetched(f"{prefix}{tmp_path}/fifo")


def test_http_is_read_without_a_package(tmp_path: Path) -> None:
    """Python's own client reads http; what is not there is the server's answer."""
    (tmp_path / "kernels.tar.gz").write_bytes(CONTENT)
    seen: list[tuple[int, int]] = []
    file = io.BytesIO()

    with served(tmp_path) as server:
        download(f"{server}/kernels.tar.gz", file, 1 << 30, lambda *done: seen.append(done))
        with pytest.raises(RemoteError, match=r"^url: HTTP Error 404: File not found: http://127"):
            fetched(f"{server}/missing.tar.gz")

    assert file.getvalue() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_http_that_ends_early_is_an_error(tmp_path: Path) -> None:
    """A broken connection is not the end of the file."""
    (tmp_path / "kernels.tar.gz").write_bytes(CONTENT)

    with served(tmp_path, cuts_short=True) as server, pytest.raises(RemoteError) as caught:
        fetched(f"{server}/kernels.tar.gz")

    assert f"expected {len(CONTENT) + 100} bytes, got {len(CONTENT)}" in str(caught.value)


def test_a_refused_connection_is_one_line() -> None:
    """A port without a listener is a RemoteError."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]

        with pytest.raises(RemoteError, match=r"Connection refused.*: http://127.0.0.1:") as caught:
            fetched(f"http://127.0.0.1:{port}/kernels.tar.gz")

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["http", "https", "HTTP"])
def test_http_is_not_written(scheme: str) -> None:
    """An upload to http fails before any byte is sent."""
    with pytest.raises(ArgumentError, match=r"^url: expected one that can be written, got "):
        upload(io.BytesIO(CONTENT), len(CONTENT), f"{scheme}://127.0.0.1:9/x", quiet)


def test_an_unknown_protocol_is_bad_usage() -> None:
    """The message names the protocol."""
    with pytest.raises(ArgumentError, match="expected a protocol that fsspec knows, got 's4'"):
        fetched("s4://bucket/kernels.tar.gz")


def test_a_missing_package_is_named() -> None:
    """The error has the package of the protocol."""
    fsspec.register_implementation("mlagentest", "mlagen_absent.Files", errtxt="Install it")

    with pytest.raises(UnsupportedError) as caught:
        fetched("mlagentest://bucket/kernels.tar.gz")

    assert str(caught.value) == (
        "url: expected a package for mlagentest://, got none; run: pip install mlagen_absent"
    )


def test_a_missing_fsspec_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without fsspec only http works."""
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
def test_secrets_are_not_shown(url: str, expected: str) -> None:
    """Printed URLs have no password and no signed query."""
    assert redacted(url) == expected


def test_secrets_are_not_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of the file system that has the URL is cleaned, too."""

    def fail(given: str) -> Any:
        raise RuntimeError(f"cannot reach\n{given}")

    monkeypatch.setattr("cache_tools.tools.remote._resolve", fail)
    url = "memory://me:secret@host/x?sign=secret"

    for transfer in (lambda: upload(io.BytesIO(), 0, url, quiet), lambda: fetched(url)):
        with pytest.raises(MlagenError) as caught:
            transfer()
        assert str(caught.value) == "url: cannot reach memory://host/x: memory://host/x"
