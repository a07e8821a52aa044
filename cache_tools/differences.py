"""In what kernels differ: labelled key_fields side by side, and the entry with the fewest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

import click

from mlagen.cache.key import CacheKey

from .report import SHORT_KEY, print_table

if TYPE_CHECKING:
    from mlagen.cache.catalog import StoredEntry

# Label, the one's value and the other's; None where one of them lacks the label.
Difference: TypeAlias = tuple[str, str | None, str | None]


def key_of_entry(stored: StoredEntry) -> CacheKey | None:
    """Return the key that an entry was made for, or None if its manifest does not tell it."""
    if stored.manifest is None:
        return None
    key = CacheKey(stored.manifest.key_fields, stored.toolchain)
    return key if key.digest == stored.key else None


def own_key(stored: StoredEntry) -> CacheKey:
    """Return the key of an entry that was verified, which compares it with the key_fields."""
    key = key_of_entry(stored)
    assert key is not None, stored
    return key


def kernel_of(key: CacheKey) -> str:
    """Return a kernel as ``str`` of its spec writes it."""
    named = dict(key.key_fields)
    spec = [
        f"{label.removeprefix('spec.')}={value}"
        for label, value in key.key_fields
        if label.startswith("spec.")
    ]
    return f"{named['family']}({', '.join(spec)})"


def differences(wanted: CacheKey, other: CacheKey) -> list[Difference]:
    """Return in what two keys differ; a compiler that will do is no difference."""
    found = wanted.differences(other)
    if wanted.accepts(other.toolchain):
        found = [difference for difference in found if difference[0] != "toolchain"]
    return found


def nearest_of(
    wanted: CacheKey, entries: Iterable[StoredEntry]
) -> tuple[StoredEntry, list[Difference]] | None:
    """Return the entry of the same family that differs in the fewest key_fields, and in which.

    Of several, the one that was used last.
    """
    family = ("family", dict(wanted.key_fields)["family"])
    found = []
    for stored in entries:
        key = key_of_entry(stored)
        if key is not None and family in key.key_fields:
            found.append((stored, differences(wanted, key)))
    return min(found, key=lambda item: (len(item[1]), -item[0].used), default=None)


def print_differences(found: list[Difference], one: str, other: str) -> None:
    """Print them as a table, and say in words what a digest does not tell."""
    print_table(
        [
            {"ingredient": label, one: _told(label, mine), other: _told(label, theirs)}
            for label, mine, theirs in found
        ]
    )
    if any(label == "templates" for label, _, _ in found):
        click.echo("templates: the kernel sources differ, as those of two versions of mlagen do")


def _told(label: str, value: str | None) -> str:
    if value is None:
        return "(none)"
    return value[:SHORT_KEY] if label == "templates" else value or "(empty)"
