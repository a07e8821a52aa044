"""The table of contents of a bundle, and streaming reads of its members."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from mlagen import __version__
from mlagen.cache.bundle import (
    ENTRY_MAX_BYTES,
    BundledEntry,
    index_to_json,
)
from mlagen.cache.bundle_members import Members
from mlagen.cache.bundle_writing import verified_entries
from mlagen.cache.entry import FileDigest
from mlagen.cache.files import DamageError
from tests.cache.bundle_cases import filled_store, key_for

FACTS = FileDigest(1, "0" * 64)
ENTRY = BundledEntry(
    key="0" * 64,
    toolchain="nvrtc-13.5.37",
    family="mla_sm80",
    arch="sm_90a",
    files={"kernel.cubin": FACTS, "manifest.json": FACTS},
)


def test_it_describes_version_sizes_and_entries(tmp_path: Path) -> None:
    """It has version, total size, and for each entry key, toolchain, kernel and files."""
    stored = list(filled_store(tmp_path, "mla_sm80").entries())
    entries = [entry for entry, _ in verified_entries(stored)]

    index = json.loads(index_to_json(entries))

    (entry,) = index["entries"]
    assert (index["schema"], index["mlagen"]) == (1, __version__)
    assert index["total_bytes"] == sum(file["size"] for file in entry["files"].values())
    assert entry["key"] == key_for("mla_sm80").digest
    assert (entry["toolchain"], entry["family"]) == ("nvrtc-13.5.37", "mla_sm80")
    assert entry["arch"] == "sm_90a"
    assert list(entry["files"]) == ["build.log", "kernel.cu", "kernel.cubin", "manifest.json"]


def test_the_size_limit_of_an_entry_is_exact() -> None:
    """The size limit of an entry is exact."""
    ENTRY.require_valid()
    size = ENTRY_MAX_BYTES - 1
    files = {**ENTRY.files, "kernel.cubin": FileDigest(size, "0" * 64)}
    BundledEntry(ENTRY.key, ENTRY.toolchain, ENTRY.family, ENTRY.arch, files).require_valid()
    files["kernel.cu"] = FACTS
    entry = BundledEntry(ENTRY.key, ENTRY.toolchain, ENTRY.family, ENTRY.arch, files)
    with pytest.raises(DamageError, match=f"expected at most {ENTRY_MAX_BYTES} bytes"):
        entry.require_valid()


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
