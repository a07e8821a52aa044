"""Entries of the cache as the commands name and describe them."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from mlagen.cache.files import DamageError
from mlagen.errors import ArgumentError, CacheError

from .report import SHORT_KEY

if TYPE_CHECKING:
    from mlagen.cache.catalog import StoredEntry
    from mlagen.cache.store import KernelStore


def entries_of(store: KernelStore, name: str) -> list[StoredEntry]:
    """Return the entries of the one key that begins with ``name``, one for each toolchain.

    ``name`` may end with ``/`` and a toolchain, to mean that entry alone. Of what lies in several
    layers, the entry that calls take is returned.

    Raises
    ------
    ArgumentError
        If no key begins with it, or several do.
    """
    prefix, slash, toolchain = name.partition("/")
    found = store.select(prefix.lower())
    keys = list(dict.fromkeys(entry.key for entry in found))
    if len(keys) > 1:
        told = ", ".join(key[: max(SHORT_KEY, len(prefix) + 4)] for key in keys)
        raise ArgumentError(f"key: expected more digits than {prefix}, got several keys: {told}")
    first: dict[str, StoredEntry] = {}
    for entry in found:
        first.setdefault(entry.toolchain, entry)
    named = [entry for entry in first.values() if not slash or entry.toolchain == toolchain]
    if not named:
        rule = "the beginning of a cached key (mlagen cache ls)"
        raise ArgumentError(f"key: expected {rule}, got {name}")
    return named


def entry_of(store: KernelStore, name: str) -> StoredEntry:
    """Return the one entry that ``name`` means.

    Raises
    ------
    ArgumentError
        If there is none, or several compilers made it and ``name`` does not say which.
    """
    found = entries_of(store, name)
    if len(found) > 1:
        told = ", ".join(entry.toolchain for entry in found)
        raise ArgumentError(f"key: expected {name}/TOOLCHAIN, got no toolchain out of {told}")
    return found[0]


def require_valid(store: KernelStore, stored: StoredEntry) -> dict[str, Any]:
    """Return an entry as JSON data, once every file of it is found to be as it was published.

    Raises
    ------
    CacheError
        If one is not, or the manifest does not tell what a kernel is.
    """
    document = document_of(stored)
    try:
        problem = document["problem"] or store.verify(stored)
    except FileNotFoundError:
        problem = "expected a kernel, got one that was just removed"
    if problem:
        raise CacheError(f"cache: {problem}: {stored.path}", path=stored.path)
    return document


def document_of(stored: StoredEntry) -> dict[str, Any]:
    """Return an entry as JSON data; what a damaged one cannot tell is None."""
    problem, facts = None, dict.fromkeys(_FACTS)
    try:
        facts = tensor_signature(stored)
    except DamageError as damage:
        problem = str(damage)
    return {
        "key": stored.key,
        "toolchain": stored.toolchain,
        "path": str(stored.path),
        "layer": str(stored.layer),
        "is_read_only": stored.is_read_only,
        "size_bytes": stored.size_bytes,
        "used": moment_of(stored.used),
        "problem": problem,
        **facts,
    }


def tensor_signature(stored: StoredEntry) -> dict[str, Any]:
    """Return what the manifest of an entry tells; one that does not is a ``DamageError``.

    Types are those of the schema whatever the manifest holds, which no seal has vouched for yet.
    """
    manifest = stored.manifest
    if manifest is None:
        raise DamageError(stored.problem or "")
    try:
        facts, created = manifest.facts, manifest.created
        kernel, because = facts["kernel"], created.get("because")
        return {
            "family": dict(manifest.key_fields)["family"],
            "spec": {name: str(value) for name, value in kernel["spec"].items()},
            "resources": _resources(facts["resources"]),
            "dynamic_shared_bytes": int(kernel["dynamic_shared_bytes"]),
            "compile_ms": _finite(float(facts["compile_ms"])),
            "created": {
                "because": None if because is None else str(because),
                "time": str(created["time"]),
                "host": str(created["host"]),
                "pid": int(created["pid"]),
                "python": str(created["python"]),
                "mlagen": str(created["mlagen"]),
            },
            "created_by": str(manifest.created_by),
        }
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        message = f"manifest.json: expected the facts of a kernel, got {error!r}"
        raise DamageError(message) from error


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(f"compile_ms {number}")
    return number


def _resources(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not kernels:
        raise ValueError("no kernel")
    return [
        {
            "symbol": str(told["symbol"]),
            "registers": int(told["registers"]),
            "stack_bytes": int(told["stack_bytes"]),
            "spill_store_bytes": int(told["spill_store_bytes"]),
            "spill_load_bytes": int(told["spill_load_bytes"]),
            "static_shared_bytes": int(told["static_shared_bytes"]),
        }
        for told in kernels
    ]


def moment_of(seconds: float) -> str | None:
    """Return a time as text; None for 0, which says there is none, and for what no date is."""
    if not seconds:
        return None
    try:
        moment = datetime.fromtimestamp(seconds, timezone.utc)
    except (OverflowError, OSError, ValueError):  # a file system keeps any number as a time
        return None
    return moment.isoformat(timespec="seconds")


# What only a manifest tells.
_FACTS = (
    "family",
    "spec",
    "resources",
    "dynamic_shared_bytes",
    "compile_ms",
    "created",
    "created_by",
)
