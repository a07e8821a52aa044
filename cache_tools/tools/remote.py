"""Remote files by fsspec; http and https by Python's own client, which needs no package."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote, unquote, urljoin

from mlagen.errors import ArgumentError, MlagenError, UnsupportedError
from mlagen.paths import require_regular

if TYPE_CHECKING:
    from http.client import HTTPResponse

_CHUNK = 1 << 20
_TIMEOUT_S = 60.0  # without a byte

OnProgress = Callable[[int, int], None]  # bytes done, bytes in all; 0 where that is unknown


class RemoteError(MlagenError, OSError):
    """A transfer failed."""


# File systems around the one of a URL, its scheme, and the rest.
_CHAINED = r"(?:(?:zip|tar|dir|\w*cache|cached)(?:://[^:@?#]*)?::)*"
_URL = re.compile(rf"({_CHAINED}(?:([\w+.-]*):(?=/))?/*)(.*)", re.DOTALL)
# Schemes without a user, of paths that may have an @.
_OF_PATHS = {None, "file", "local", "memory", "s3", "s3a", "gs", "gcs", "hf"}
# Where a query or a fragment begins, also an escaped one, or one that has lost its question mark.
_QUERY = re.compile(r"[?#]|%3F|%23|[&;](?=[^/&;]*=)", re.IGNORECASE)
_NO_PORT = re.compile(r"(\[[^/?#]*\]|(?!\[)[^/?#:]*):(?!\d*([/?#]|$))", re.DOTALL)


def redacted(url: str) -> str:
    """Return a URL without its secrets: user and password, a signed query, a fragment."""
    return _split(url)[0]


def _split(url: str) -> tuple[str, str]:
    """Return the public part of a URL, and its secrets.

    A password may itself hold each of ``/?#@:``, so with an @ only the part behind the last one may
    be public, and that only behind a plain user. A port that is no number is a password, too.
    """
    found = _URL.fullmatch(url)
    assert found is not None, url
    head, scheme, body = found.groups()
    user, _, place = body.rpartition("@")
    if scheme in _OF_PATHS and not re.match(r"[^/?#]*@|[^@]*:.*@", body, re.DOTALL):
        user, place = "", body
    public, *query = _QUERY.split(place, maxsplit=1)
    if scheme and not head.endswith("///") and _NO_PORT.match(place):
        user = f"{user}/{public}"
    secrets = "/".join([user, *query])
    is_unclear = re.search(r"[/?#@\\]", user)
    return f"{head}{'...' if is_unclear else public}", secrets


def upload(file: BinaryIO, size_bytes: int, url: str, on_progress: OnProgress) -> None:
    """Write a file to a URL, atomically where the file system supports it.

    Raises ArgumentError if the URL is not writable; UnsupportedError if the package for its
    protocol is missing; RemoteError if the transfer fails.
    """
    if _is_http(url):
        raise ArgumentError(f"url: expected one that can be written, got {redacted(url)}")
    with _failures(url):
        fs, path = _resolve(url)
        file.seek(0)
        if _is_local(fs):
            # fsspec would write to the temporary folder and copy it.
            from mlagen.cache.bundle import atomic_file

            with atomic_file(Path(path)) as target:
                _copy(file, target, size_bytes, size_bytes, on_progress)
        else:
            with fs.transaction, fs.open(path, "wb") as target:
                _copy(file, target, size_bytes, size_bytes, on_progress)


def download(url: str, file: BinaryIO, max_bytes: int, on_progress: OnProgress) -> None:
    """Read a URL into a file.

    Raises ArgumentError if the URL is not readable; UnsupportedError if the package for its
    protocol is missing; RemoteError if the transfer fails, or exceeds ``max_bytes``.
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


def _require_http(url: str) -> None:
    if not _is_http(url):
        raise ValueError(url)


def _is_local(fs: Any) -> bool:
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def _opened_http(url: str) -> HTTPResponse:
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class Redirects(HTTPRedirectHandler):
        """Follows redirects; a target may be signed, so messages have no part of it."""

        def http_error_302(self, req: Request, fp: Any, code: int, msg: str, headers: Any) -> Any:
            # Python's handler takes the other one, too.
            target = headers.get("location", headers.get("uri", ""))
            try:
                _require_http(urljoin(req.full_url, target))
                return super().http_error_302(req, fp, code, msg, headers)
            except URLError as error:
                fp.close()  # each response holds its connection
                if isinstance(error, HTTPError):
                    error.close()
                message = _without(_message_of(error), target)
                raise RemoteError(f"url: {message}: {redacted(url)}") from None
            except (HTTPException, ValueError) as error:
                fp.close()
                kind = type(error).__name__
                rule = "expected a redirect to a valid http or https URL"
                raise RemoteError(f"url: {rule}, got another, {kind}: {redacted(url)}") from None

        http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    if re.match("[^/]*//[^/?#]*@", url):  # Python's client takes them for a part of the host
        rule, got = "one without user and password", f"one with them: {redacted(url)}"
        raise ArgumentError(f"url: expected {rule}, got {got}; use a signed URL")
    request = Request(url, headers={"User-Agent": "mlagen"})  # noqa: S310 - _is_http checked it
    try:
        response: HTTPResponse = build_opener(Redirects).open(request, timeout=_TIMEOUT_S)
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
        _reject_registry(protocol)
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        package = (cause.name or protocol).partition(".")[0]
        rule = f"expected a package for {protocol}://, got none"
        raise UnsupportedError(f"url: {rule}; run: pip install {package}") from error
    except ValueError as error:
        if "rotocol not known" not in str(error):
            raise
        _reject_registry(protocol)
        raise ArgumentError(
            f"url: expected a protocol that fsspec knows, got {redacted(protocol)!r}"
        ) from error


def _reject_registry(protocol: str) -> None:
    """Reject the URL of an image registry; to fsspec ``oci`` is an object storage."""
    if protocol in {"oci", "oras", "docker"}:
        rule = "expected http, https or a protocol of fsspec, such as s3, gs, hf or sftp"
        raise ArgumentError(
            f"url: {rule}, got {protocol}://; for a registry, run: mlagen cache export FILE, and "
            "oras push REGISTRY FILE"
        )


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
    except MlagenError as error:
        error.args = (_without_secrets(str(error), url),)
        raise
    except Exception as error:
        message = " ".join(_without_secrets(_message_of(error), url).split())
        raise RemoteError(f"url: {message}: {redacted(url)}") from error


def _without_secrets(message: str, url: str) -> str:
    """Return a message without the secrets of a URL."""
    public, hidden = _split(url)
    return _without(message.replace(url, public), hidden)


def _without(message: str, hidden: str) -> str:
    """Return a message without the parts of a text, which parsers split, quote and escape."""
    forms = "/".join([hidden, unquote(hidden), quote(hidden), repr(hidden)[1:-1]])
    parts = {*re.split(r"[/?#@:\x00-\x20]", forms)} - {""}
    for part in sorted(parts, key=len, reverse=True):
        # A short one may be a part of a word.
        end = r"(?!\w)" if len(part) < 4 else ""
        start = r"(?<!\w)" if len(part) < 4 else ""
        message = re.sub(f"{start}{re.escape(part)}{end}", "...", message, flags=re.IGNORECASE)
    return message


def _message_of(error: Exception) -> str:
    cause = getattr(error, "reason", None)  # of an HTTP client: the system's error
    source = cause if isinstance(cause, OSError) else error
    if isinstance(source, FileNotFoundError):  # some file systems give only the path
        return os.strerror(errno.ENOENT)
    return getattr(source, "strerror", None) or str(source) or type(source).__name__
