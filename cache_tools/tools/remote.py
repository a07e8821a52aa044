"""Remote files by fsspec; http and https by Python's own client, which needs no package."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote

from mlagen.errors import ArgumentError, MlagenError, UnsupportedError
from mlagen.paths import require_regular

if TYPE_CHECKING:
    from http.client import HTTPResponse

_CHUNK = 1 << 20
_TIMEOUT_S = 60.0  # without a byte

OnProgress = Callable[[int, int], None]  # bytes done, bytes in all; 0 where that is unknown


class RemoteError(MlagenError, OSError):
    """A transfer failed."""


# A user and a password, which may itself hold each of /?#@, or a port and an @ behind it.
_USER = re.compile(r"//(?=[^/?#]*[:@]).*@", re.DOTALL)
_PLAIN_USER = re.compile(r"//[^/?#@]*@")


def redacted(url: str) -> str:
    """Return a URL without its secrets: user and password, a signed query, a fragment."""
    if user := _USER.search(url):
        rest = url[user.end() :] if _PLAIN_USER.fullmatch(user[0]) else "..."
        url = f"{url[: user.start()]}//{rest}"
    return re.split("[?#]", url, maxsplit=1)[0]


def upload(file: BinaryIO, size_bytes: int, url: str, on_progress: OnProgress) -> None:
    """Write a file to a URL, atomically where the file system supports it.

    Raises
    ------
    ArgumentError
        If the URL is not writable.
    UnsupportedError
        If the package for its protocol is missing.
    RemoteError
        If the transfer fails.
    """
    if _is_http(url):
        raise ArgumentError(f"url: expected one that can be written, got {redacted(url)}")
    with _failures(url):
        fs, path = _resolve(url)
        file.seek(0)
        if _is_local(fs):
            # fsspec would write to the temporary folder and copy it.
            from mlagen.cache.bundle_writing import atomic_file

            with atomic_file(Path(path)) as target:
                _copy(file, target, size_bytes, size_bytes, on_progress)
        else:
            with fs.transaction, fs.open(path, "wb") as target:
                _copy(file, target, size_bytes, size_bytes, on_progress)


def download(url: str, file: BinaryIO, max_bytes: int, on_progress: OnProgress) -> None:
    """Read a URL into a file.

    Raises
    ------
    ArgumentError
        If the URL is not readable.
    UnsupportedError
        If the package for its protocol is missing.
    RemoteError
        If the transfer fails, or exceeds ``max_bytes``.
    """
    with _failures(url):
        if _is_http(url):
            with _opened_http(url) as response:
                length = int(response.headers.get("Content-Length") or 0)
                got = _copy(response, file, length, max_bytes, on_progress)
                if length and got != length:
                    raise OSError(f"expected {length} bytes, got {got}")
        else:
            fs, path = _resolve(url)
            if _is_local(fs):
                require_regular(Path(path))
            with fs.open(path, "rb") as source:
                length = int(getattr(source, "size", None) or 0)
                _copy(source, file, length, max_bytes, on_progress)


def _is_http(url: str) -> bool:
    return url.partition("://")[0].lower() in {"http", "https"}


def _is_local(fs: Any) -> bool:
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def _opened_http(url: str) -> HTTPResponse:
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    if re.match("[^/]*//[^/?#]*@", url):  # Python's client takes them for a part of the host
        rule, got = "one without user and password", f"one with them: {redacted(url)}"
        raise ArgumentError(f"url: expected {rule}, got {got}; use a signed URL")
    request = Request(url, headers={"User-Agent": "mlagen"})  # noqa: S310 - _is_http checked it
    try:
        response: HTTPResponse = urlopen(request, timeout=_TIMEOUT_S)  # noqa: S310 - the same
    except HTTPError as error:
        error.close()  # it holds the connection
        raise
    return response


def _resolve(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it."""
    protocol = url.partition("://")[0] if "://" in url else "file"
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)  # type: ignore[no-any-return]
    except ImportError as error:
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        package = (cause.name or protocol).partition(".")[0]
        rule = f"expected a package for {protocol}://, got none"
        raise UnsupportedError(f"url: {rule}; run: pip install {package}") from error
    except ValueError as error:
        if "rotocol not known" not in str(error):
            raise
        raise ArgumentError(
            f"url: expected a protocol that fsspec knows, got {protocol!r}"
        ) from error


def _copy(source: Any, target: Any, length: int, max_bytes: int, on_progress: OnProgress) -> int:
    done = 0
    while chunk := source.read(_CHUNK):
        done += len(chunk)
        if max(done, length) > max_bytes:
            raise OSError(f"expected at most {max_bytes} bytes, got more")
        target.write(chunk)
        on_progress(done, length)
    return done


@contextmanager
def _failures(url: str) -> Iterator[None]:
    """Raise any failure as one line; each file system has its own exceptions."""
    try:
        yield
    except MlagenError:
        raise
    except Exception as error:
        message = " ".join(_without_secrets(_message_of(error), url).split())
        raise RemoteError(f"url: {message}: {redacted(url)}") from error


def _without_secrets(message: str, url: str) -> str:
    """Return a message without the secrets of a URL, which parsers split, quote and escape."""
    user = _USER.search(url)
    hidden = "/".join([user[0] if user else "", *re.split("[?#]", url, maxsplit=1)[1:]])
    parts = {*re.split(r"[/?#@:\x00-\x20]", f"{hidden}/{unquote(hidden)}")} - {""}
    message = message.replace(url, redacted(url))
    for part in sorted(parts, key=len, reverse=True):
        message = re.sub(rf"(?<!\w){re.escape(part)}(?!\w)", "...", message)
    return message


def _message_of(error: Exception) -> str:
    cause = getattr(error, "reason", None)  # of an HTTP client: the system's error
    source = cause if isinstance(cause, OSError) else error
    if isinstance(source, FileNotFoundError):  # some file systems give only the path
        return os.strerror(errno.ENOENT)
    return getattr(source, "strerror", None) or str(source) or type(source).__name__
