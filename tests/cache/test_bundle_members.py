"""Streaming reads of tar members, in chunks."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from contextlib import nullcontext

import pytest

from mlagen.cache.bundle_members import Members, digest_of
from mlagen.cache.files import DamageError

CONTENT = bytes(range(256)) * 12_000  # 3 MB, three chunks


def tar_of(content: bytes, *, blocks: int = 2) -> bytes:
    """Return a gzipped tar with one member, and that many zero blocks at its end."""
    info = tarfile.TarInfo("name")
    info.size = len(content)
    padding = bytes(-len(content) % 512 + 512 * blocks)
    return gzip.compress(info.tobuf(tarfile.USTAR_FORMAT) + content + padding, 1)


def test_content_comes_in_chunks() -> None:
    """No chunk is larger than 1 MiB, and together they are the content."""
    members = Members(io.BytesIO(tar_of(CONTENT)))
    size = members.next_size("name", max_bytes=len(CONTENT))
    chunks = list(members.chunks(size))
    assert len(chunks) == 3
    assert max(map(len, chunks)) <= 1 << 20
    assert b"".join(chunks) == CONTENT
    members.require_end()


@pytest.mark.parametrize("blocks", [0, 2, 20, 21])
def test_padding_is_limited_to_a_record(blocks: int) -> None:
    """A tar may be padded with zero blocks up to one record."""
    members = Members(io.BytesIO(tar_of(b"content", blocks=blocks)))
    list(members.chunks(members.next_size("name", max_bytes=7)))
    with nullcontext() if blocks <= 20 else pytest.raises(DamageError, match="expected the end"):
        members.require_end()


def test_digest_covers_the_whole_file() -> None:
    """The file is read from its start, wherever its position is."""
    file = io.BytesIO(CONTENT)
    file.seek(1000)
    assert digest_of(file) == (hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
