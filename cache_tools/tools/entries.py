"""Cache entries as the commands name, describe and compare them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from mlagen.cache.key import CacheKey
from mlagen.errors import ArgumentError, CacheError, ToolchainError

from ..output.report import SHORT_KEY, print_table

if TYPE_CHECKING:
    from mlagen.cache.store import KernelStore, StoredEntry


def entries_of(store: KernelStore, name: str) -> list[StoredEntry]:
    """Return the entries of the one key that begins with ``name``, one for each toolchain.

    ``name`` may end with ``/`` and a toolchain, to mean that entry alone. An entry of several
    layers is returned once, from the layer that calls load it from. Raises ArgumentError if no key
    or more than one key begins with it.
    """
    prefix, slash, toolchain = name.partition("/")
    found = store.select(prefix.lower())
    keys = list(dict.fromkeys(entry.key for entry in found))
    if len(keys) > 1:
        matches = ", ".join(key[: max(SHORT_KEY, len(prefix) + 4)] for key in keys)
        raise ArgumentError(f"key: expected more digits than {prefix}, got several keys: {matches}")
    first: dict[str, StoredEntry] = {}
    for entry in found:
        first.setdefault(entry.toolchain, entry)
    named = [entry for entry in first.values() if not slash or entry.toolchain == toolchain]
    if not named:
        rule = "a prefix of a cached key (mlagen cache ls)"
        raise ArgumentError(f"key: expected {rule}, got {name}")
    return named


def entry_of(store: KernelStore, name: str) -> StoredEntry:
    """Return the single entry that ``name`` identifies.

    Raises ArgumentError if there is none, or several compilers built it and ``name`` has no
    toolchain.
    """
    found = entries_of(store, name)
    if len(found) > 1:
        toolchains = ", ".join(entry.toolchain for entry in found)
        rule = f"{name}/TOOLCHAIN"
        raise ArgumentError(f"key: expected {rule}, got no toolchain out of {toolchains}")
    return found[0]


def require_valid(stored: StoredEntry) -> dict[str, Any]:
    """Return an entry as JSON data after every file matches its digest.

    Raises CacheError if a file does not match, or the manifest does not describe a kernel.
    """
    from mlagen.cache.store import verify

    document = document_of(stored)
    try:
        problem = verify(stored) or document["problem"]
    except FileNotFoundError:
        problem = "expected a kernel, got one that was removed meanwhile"
    if problem:
        raise CacheError(f"cache: {problem}: {stored.path}", path=stored.path)
    return document


def document_of(stored: StoredEntry) -> dict[str, Any]:
    """Return an entry as JSON data; the manifest fields of a damaged one are None."""
    manifest = stored.manifest
    document = {
        "key": stored.key,
        "toolchain": stored.toolchain,
        "path": str(stored.path),
        "layer": str(stored.layer),
        "is_read_only": stored.is_read_only,
        "size_bytes": stored.size_bytes,
        "used": iso_time(stored.used),
        "problem": stored.problem or "" if manifest is None else None,
        **dict.fromkeys(_MANIFEST_FIELDS),
    }
    if manifest is not None:
        facts, key_fields = manifest.facts, dict(manifest.key_fields)
        document |= {
            "family": key_fields["family"],
            "spec": facts["kernel"]["spec"],
            "resources": resources_of(facts["resources"]),
            "dynamic_shared_bytes": facts["kernel"]["dynamic_shared_bytes"],
            "line_info": key_fields.get("line_info"),
            "compile_ms": facts["compile_ms"],
            "created": {name: manifest.created.get(name) for name in _CREATED_FIELDS},
            "created_by": manifest.created_by,
        }
    return document


def resources_of(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the resources of a manifest, which may have further ones, in the schema's order."""
    return [{name: kernel[name] for name in _RESOURCE_FIELDS} for kernel in kernels]


def iso_time(seconds: float) -> str | None:
    """Return a time as text; None for 0, which means no time, and for a value that is no date."""
    if not seconds:
        return None
    try:
        moment = datetime.fromtimestamp(seconds, timezone.utc)
    except (OverflowError, OSError, ValueError):  # a file system stores any number as a time
        return None
    return moment.isoformat(timespec="seconds")


# Fields that only a manifest holds.
_MANIFEST_FIELDS = (
    *("family", "spec", "resources", "dynamic_shared_bytes", "line_info", "compile_ms"),
    *("created", "created_by"),
)
_CREATED_FIELDS = ("because", "time", "host", "pid", "python", "mlagen")
_RESOURCE_FIELDS = (
    *("symbol", "registers", "stack_bytes", "spill_store_bytes", "spill_load_bytes"),
    "static_shared_bytes",
)


def required_toolchain() -> str | None:
    """Return the toolchain of the keys of this installation, or None if it is unknown."""
    from mlagen.compiler.toolchain import wanted_toolchain
    from mlagen.settings import current_settings

    try:
        return wanted_toolchain(current_settings().toolchain)
    except ToolchainError:
        return None


def required_line_info() -> str | None:
    """Return the folder of the line info that keys of this installation name, if any."""
    from mlagen.codegen.sources import template_root
    from mlagen.settings import current_settings

    return str(template_root()) if current_settings().line_info else None


def matches_sources(stored: StoredEntry, digests: Collection[str]) -> bool:
    """Whether an entry was rendered from sources with one of ``digests``; False if damaged."""
    from mlagen.codegen.sources import CODEGEN

    if stored.manifest is None:
        return False
    fields = dict(stored.manifest.key_fields)
    return fields.get("templates") in digests and fields.get("codegen") == CODEGEN


def matches_toolchain(stored: StoredEntry, toolchain: str | None) -> bool:
    """Whether a lookup for ``toolchain`` accepts the compiler of an entry."""
    return toolchain is not None and CacheKey((), toolchain).accepts(stored.toolchain)


# Label and the two values; None for a key without the label.
Difference: TypeAlias = tuple[str, str | None, str | None]

_DIGESTS = ("fact.declarations", "templates")  # labels of values that are a SHA-256


def key_of_entry(stored: StoredEntry) -> CacheKey | None:
    """Return the key of an entry, or None if its manifest does not hold it."""
    if stored.manifest is None:
        return None
    key = CacheKey(stored.manifest.key_fields, stored.toolchain)
    return key if key.digest == stored.key else None


def kernel_of(key: CacheKey) -> str:
    """Return the kernel as ``str`` of its spec formats it."""
    named = dict(key.key_fields)
    spec = [
        f"{label.removeprefix('spec.')}={value}"
        for label, value in key.key_fields
        if label.startswith("spec.")
    ]
    return f"{named['family']}({', '.join(spec)})"


def differences(wanted: CacheKey, other: CacheKey) -> list[Difference]:
    """Return the differences of two keys; an accepted toolchain is no difference.

    Other fields of the spec have other facts, which then say nothing new.
    """
    found = wanted.differences(other)
    if any(label.startswith("spec.") for label, _, _ in found):
        found = [difference for difference in found if not difference[0].startswith("fact.")]
    if wanted.accepts(other.toolchain):
        found = [difference for difference in found if difference[0] != "toolchain"]
    return found


def nearest_entry(
    wanted: CacheKey, entries: Iterable[StoredEntry]
) -> tuple[StoredEntry, list[Difference]] | None:
    """Return the entry of the same family with the fewest differing key fields, and those fields.

    Ties go to the most recently used entry.
    """
    family = ("family", dict(wanted.key_fields)["family"])
    found = []
    for stored in entries:
        key = key_of_entry(stored)
        if key is not None and family in key.key_fields:
            found.append((stored, differences(wanted, key)))
    return min(found, key=lambda item: (len(item[1]), -item[0].used), default=None)


def print_differences(found: list[Difference], one: str, other: str) -> None:
    """Print the differences as a table, with a sentence about differing template digests."""
    print_table(
        [
            {"key_field": label, one: _text(label, mine), other: _text(label, theirs)}
            for label, mine, theirs in found
        ]
    )
    labels = {label for label, _, _ in found}
    if "templates" in labels and "family" not in labels:
        click.echo("templates: the kernel sources differ, as between two versions of mlagen")


def _text(label: str, value: str | None) -> str:
    if value is None:
        return "(none)"
    return value[:SHORT_KEY] if label in _DIGESTS else value or "(empty)"
