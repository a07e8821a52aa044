"""Differences between cache keys: key fields side by side, and the nearest entry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

import click

from mlagen.cache.key import CacheKey

from ..output.report import SHORT_KEY, print_table

if TYPE_CHECKING:
    from mlagen.cache.store import StoredEntry

# Label and the two values; None for a key without the label.
Difference: TypeAlias = tuple[str, str | None, str | None]

_DIGESTS = ("fact.declarations", "templates")  # labels of values that are a SHA-256


def key_of_entry(stored: StoredEntry) -> CacheKey | None:
    """Return the key of an entry, or None if its manifest does not hold it."""
    if stored.manifest is None:
        return None
    key = CacheKey(stored.manifest.key_fields, stored.toolchain)
    return key if key.digest == stored.key else None


def own_key(stored: StoredEntry) -> CacheKey:
    """Return the key of a verified entry; verifying compares it with the key fields."""
    key = key_of_entry(stored)
    assert key is not None, stored
    return key


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
