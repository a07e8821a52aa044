"""The table of contents of a bundle: its content, and its round trip through JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlagen import __version__
from mlagen.cache.bundle import (
    ENTRY_MAX_BYTES,
    BundledEntry,
    index_from_json,
    index_to_json,
    total_bytes,
)
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


def test_entries_survive_the_round_trip(tmp_path: Path) -> None:
    """Entries survive the round trip through JSON."""
    entries = tuple(entry for entry, _ in verified_entries(list(filled_store(tmp_path).entries())))
    read = index_from_json(index_to_json(entries), max_bytes=total_bytes(entries))
    assert read == entries


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
