"""Streaming reader of bundle members: each member must match the expected name.

It replaces :class:`tarfile.TarFile`, which reads GNU and PAX extensions into memory at any declared
size, and trusts the sizes in headers instead of the table of contents.
"""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from mlagen.cache.files import DamageError

_CHUNK = 1 << 20
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.DIRTYPE: "a folder",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a FIFO",
}


def digest_of(file: BinaryIO) -> tuple[str, int]:
    """Return the SHA-256 and the size of a whole file."""
    digest, size = hashlib.sha256(), 0
    file.seek(0)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


class Members:
    """Sequential access to the members of a gzipped tar.

    Every method raises :class:`DamageError` if the next data is not the expected one.
    """

    def __init__(self, file: BinaryIO) -> None:
        file.seek(0)
        self._packed = gzip.GzipFile(fileobj=file, mode="rb")

    def next_size(self, name: str, *, max_bytes: int) -> int:
        """Advance to the member ``name``, which must be next, and return its size."""
        block = self._read(tarfile.BLOCKSIZE)
        if not any(block):
            raise DamageError(f"expected the member {name}, got the end")
        try:
            info = tarfile.TarInfo.frombuf(block, "ascii", "backslashreplace")
        except tarfile.TarError as error:
            raise DamageError(f"expected the member {name}, got no tar: {error}") from error
        if info.name != name:
            raise DamageError(f"expected the member {name}, got {info.name!r}")
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            kind = _KINDS.get(info.type, f"type {info.type!r}")
            raise DamageError(f"{name}: expected a regular file, got {kind}")
        if not 0 <= info.size <= max_bytes:
            raise DamageError(f"{name}: expected at most {max_bytes} bytes, got {info.size}")
        return info.size

    def chunks(self, size: int) -> Iterator[bytes]:
        """Yield the content of a member of that size in chunks, then skip its padding."""
        remaining = size
        while remaining:
            chunk = self._read(min(remaining, _CHUNK))
            if not chunk:
                raise DamageError(f"expected {remaining} bytes more, got the end")
            remaining -= len(chunk)
            yield chunk
        self._read(-size % tarfile.BLOCKSIZE)

    def require_end(self) -> None:
        """Raise unless only the end of the file remains."""
        # A tar ends with two zero blocks; some programs pad to a whole record.
        rest = self._read(tarfile.RECORDSIZE + 1)
        if any(rest) or len(rest) > tarfile.RECORDSIZE:
            raise DamageError("expected the end after the last member, got more")

    def _read(self, size: int) -> bytes:
        try:
            return self._packed.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DamageError(f"expected a whole gzip file, got {error}") from error
