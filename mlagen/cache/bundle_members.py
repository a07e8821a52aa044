"""The members of a bundle as a stream: each must be the one that is expected, and nothing else.

Not :class:`tarfile.TarFile`, which reads the long names and attributes of other dialects into
memory at whatever size they claim, and follows sizes in headers rather than those announced.
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
    """Return the SHA-256 and the size of a file, from its start."""
    digest, size = hashlib.sha256(), 0
    file.seek(0)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


class Members:
    """The members of a gzipped tar, one after the other, from the start of ``file``.

    Every method raises :class:`DamageError` if what comes next is not what is expected.
    """

    def __init__(self, file: BinaryIO) -> None:
        file.seek(0)
        self._packed = gzip.GzipFile(fileobj=file, mode="rb")

    def next_size(self, name: str, *, max_bytes: int) -> int:
        """Go to the member ``name``, which must come next, and return its size."""
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
        """Yield the content of a member of that size, in pieces, and pass its padding."""
        left = size
        while left:
            chunk = self._read(min(left, _CHUNK))
            if not chunk:
                raise DamageError(f"expected {left} bytes more, got the end")
            left -= len(chunk)
            yield chunk
        self._read(-size % tarfile.BLOCKSIZE)

    def require_end(self) -> None:
        """Read to the end of the file, which must come now."""
        # A tar ends with two empty blocks, and some programs fill up to a whole record.
        rest = self._read(tarfile.RECORDSIZE + 1)
        if any(rest) or len(rest) > tarfile.RECORDSIZE:
            raise DamageError("expected the end after the last member, got more")

    def _read(self, size: int) -> bytes:
        try:
            return self._packed.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DamageError(f"expected a whole gzip file, got {error}") from error
