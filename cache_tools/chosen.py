"""Which entries a command takes, of all in the cache: by key, by target, by family, by compiler."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import click

from mlagen.errors import ArgumentError

from .entries import entries_of
from .entry_options import (
    Choice,
    arch_option,
    family_option,
    layers_option,
    names_of,
    toolchain_option,
)

if TYPE_CHECKING:
    from mlagen.cache.catalog import StoredEntry
    from mlagen.cache.store import KernelStore

    from .report import Command


def choice_options(command: Command) -> Command:
    """Add what :func:`chosen_entries` takes: ``KEY...`` and the filters."""
    argument = click.argument("keys", metavar="[KEY]...", nargs=-1)
    for decorate in (layers_option, toolchain_option, family_option, arch_option, argument):
        command = decorate(command)
    return command


def chosen_entries(
    store: KernelStore, keys: Sequence[str], choice: Choice | None = None, *, layers: bool = False
) -> list[StoredEntry]:
    """Return the entries that are named and fit, each kernel once, in the order of their keys.

    A damaged entry whose manifest cannot be read fits any target and family: it may be one of
    those wanted, and whoever uses it finds it damaged.

    Raises
    ------
    ArgumentError
        If a key names no entry, a value of a filter fits none, or nothing is left.
    """
    found = list(_named(store, keys, layers=layers))
    for label, values in (choice or Choice()).wanted().items():
        there = set().union(*(names_of(stored, label) for stored in found))
        for value in values:
            if value not in there:
                told = ", ".join(sorted(there)) or "nothing"
                raise ArgumentError(f"{label}: expected one that is cached ({told}), got {value!r}")
        found = [stored for stored in found if _may_be(names_of(stored, label), values)]
    if not found:
        rule = "some that fit" if layers else "some that fit (--layers: read-only layers too)"
        raise ArgumentError(f"kernels: expected {rule}, got none in {store.root}")
    once: dict[tuple[str, str], StoredEntry] = {}
    for stored in found:  # what lies in the cache folder comes before what lies in a layer
        once.setdefault((stored.key, stored.toolchain), stored)
    return [stored for _, stored in sorted(once.items())]


def _named(store: KernelStore, keys: Sequence[str], *, layers: bool) -> Iterable[StoredEntry]:
    if not keys:
        return store.entries(layers=layers)
    named = (stored for key in keys for stored in entries_of(store, key))
    return (stored for stored in named if layers or not stored.is_read_only)


def _may_be(names: set[str], values: Collection[str]) -> bool:
    return not names or not names.isdisjoint(values)
