"""Entries of the cache as the `cache` commands name and describe them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlagen.errors import ArgumentError

from .report import SHORT_KEY

if TYPE_CHECKING:
    from mlagen.cache.catalog import StoredEntry
    from mlagen.cache.store import KernelStore


def entries_of(store: KernelStore, prefix: str) -> list[StoredEntry]:
    """Return the entries of the one key that begins with ``prefix``, one for each toolchain.

    Raises
    ------
    ArgumentError
        If no key begins with it, or several do.
    """
    found = store.select(prefix.lower())
    keys = list(dict.fromkeys(entry.key for entry in found))
    if not keys:
        raise ArgumentError(f"key: expected the beginning of a cached key, got {prefix}")
    if len(keys) > 1:
        told = ", ".join(key[: max(SHORT_KEY, len(prefix) + 4)] for key in keys)
        raise ArgumentError(f"key: expected more digits than {prefix}, got several keys: {told}")
    return found


def document_of(stored: StoredEntry) -> dict[str, Any]:
    """Return an entry as JSON data."""
    manifest = stored.manifest
    document = {
        "key": stored.key,
        "toolchain": stored.toolchain,
        "path": str(stored.path),
        "size_bytes": stored.size_bytes,
        "problem": stored.problem,
    }
    if manifest is not None:
        document |= {
            "family": dict(manifest.ingredients).get("family"),
            "spec": dict(manifest.facts["kernel"]["spec"]),
            "resources": manifest.facts["resources"],
            "dynamic_shared_bytes": manifest.facts["kernel"]["dynamic_shared_bytes"],
            "compile_ms": manifest.facts["compile_ms"],
            "created": dict(manifest.created),
            "created_by": manifest.created_by,
        }
    return document
