"""The members of a tar as a stream: pieces, not wholes."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile

import pytest

from mlagen.cache.bundle_members import Members, digest_of
from mlagen.cache.files import DamageError

CONTENT = bytes(range(256)) * 12_000  # 3 MB, three pieces


def tar_of(content: bytes, *, blocks: int = 2) -> bytes:
    """Return a gzipped tar with one member, and that many empty blocks at its end."""
    info = tarfile.TarInfo("name")
    info.size = len(content)
    padding = bytes(-len(content) % 512 + 512 * blocks)
    return gzip.compress(info.tobuf(tarfile.USTAR_FORMAT) + content + padding, 1)


def test_content_comes_in_pieces() -> None:
    """No piece is larger than a MiB, and together they are the content."""
    members = Members(io.BytesIO(tar_of(CONTENT)))

    size = members.next_size("name", max_bytes=len(CONTENT))
    chunks = list(members.chunks(size))

    assert len(chunks) == 3
    assert max(map(len, chunks)) <= 1 << 20
    assert b"".join(chunks) == CONTENT
    members.require_end()


@pytest.mark.parametrize("blocks", [0, 2, 20], ids=["none", "two", "a whole record"])
def test_the_end_may_be_filled_up(blocks: int) -> None:
    """Programs end a tar with as many empty blocks as they like, up to a record."""
    members = Members(io.BytesIO(tar_of(b"content", blocks=blocks)))
    list(members.chunks(members.next_size("name", max_bytes=7)))

    members.require_end()


def test_the_end_is_not_filled_up_without_end() -> None:
    """More than a record of nothing is more than nothing."""
    members = Members(io.BytesIO(tar_of(b"content", blocks=21)))
    list(members.chunks(members.next_size("name", max_bytes=7)))

    with pytest.raises(DamageError, match="expected the end"):
        members.require_end()


def test_digest_is_of_the_whole_file() -> None:
    """Wherever the file stands, it is read from its start."""
    file = io.BytesIO(CONTENT)
    file.seek(1000)

    assert digest_of(file) == (hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
