"""Entry selection of a command: by key, target, family and compiler."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import click

from mlagen.errors import ArgumentError

from ..tools.completion import complete_key
from ..tools.entries import entries_of
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

    from ..output.report import Command


def choice_options(command: Command) -> Command:
    """Add the arguments of :func:`chosen_entries`: ``KEY...`` and the filters."""
    argument = click.argument("keys", metavar="[KEY]...", nargs=-1, shell_complete=complete_key)
    for decorate in (layers_option, toolchain_option, family_option, arch_option, argument):
        command = decorate(command)
    return command


def chosen_entries(
    store: KernelStore, keys: Sequence[str], choice: Choice | None = None, *, layers: bool = False
) -> list[StoredEntry]:
    """Return the named entries that match the filters, each kernel once, sorted by key.

    A damaged entry without a readable manifest matches every target and family: it may be a
    requested one, and its damage shows when it is read.

    Raises
    ------
    ArgumentError
        If a key names no entry, a filter value matches none, or the selection is empty.
    """
    found = list(_named(store, keys, layers=layers))
    for label, values in (choice or Choice()).requested().items():
        present = set().union(*(names_of(stored, label) for stored in found))
        for value in values:
            if value not in present:
                cached = ", ".join(sorted(present)) or "nothing"
                raise ArgumentError(f"{label}: expected a cached one ({cached}), got {value!r}")
        found = [stored for stored in found if _may_match(names_of(stored, label), values)]
    if not found:
        rule = "matching ones" if layers else "matching ones (--layers: read-only layers too)"
        raise ArgumentError(f"kernels: expected {rule}, got none in {store.root}")
    unique: dict[tuple[str, str], StoredEntry] = {}
    for stored in found:  # entries of the cache folder precede those of a layer
        unique.setdefault((stored.key, stored.toolchain), stored)
    return [stored for _, stored in sorted(unique.items())]


def _named(store: KernelStore, keys: Sequence[str], *, layers: bool) -> Iterable[StoredEntry]:
    if not keys:
        return store.entries(layers=layers)
    named = (stored for key in keys for stored in entries_of(store, key))
    return (stored for stored in named if layers or not stored.is_read_only)


def _may_match(names: set[str], values: Collection[str]) -> bool:
    return not names or not names.isdisjoint(values)
