"""Options of the commands that select entries: by key, target, family, compiler and age."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from mlagen.errors import ArgumentError

from ..tools.completion import arch_names, complete_key, completer, family_names
from ..tools.entries import entries_of
from .options import names, values_option

if TYPE_CHECKING:
    from mlagen.cache.store import KernelStore, StoredEntry

    from ..output.report import Command

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|w)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_KEY_FIELDS = {"arch": "spec.arch", "family": "family"}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Filters of the entry options; None matches every entry."""

    archs: Collection[str] | None = None
    families: Collection[str] | None = None
    toolchains: Collection[str] | None = None
    age_s: float | None = None

    def requested(self) -> dict[str, Collection[str]]:
        """Return the requested names by label."""
        given = {"arch": self.archs, "family": self.families, "toolchain": self.toolchains}
        return {label: values for label, values in given.items() if values is not None}

    def matches(self, stored: StoredEntry) -> bool:
        """Whether an entry matches; a damaged one lacks the names of its manifest."""
        return all(
            not names_of(stored, label).isdisjoint(values)
            for label, values in self.requested().items()
        ) and (self.age_s is None or is_older(stored, self.age_s))


def names_of(stored: StoredEntry, label: str) -> set[str]:
    """Return the names that match an entry; none if a damaged manifest lacks the label.

    A toolchain has two: its own, and its major version, which matches every patch level.
    """
    if label == "toolchain":
        return {stored.toolchain, stored.toolchain.partition(".")[0]}
    key_fields = stored.manifest.key_fields if stored.manifest else ()
    return {value for name, value in key_fields if name == _KEY_FIELDS[label]}


def is_older(stored: StoredEntry, age_s: float) -> bool:
    """Whether an entry was last used more than ``age_s`` seconds ago."""
    return time.time() - stored.used > age_s


def age(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    """Parse an age; return seconds."""
    if value is None:
        return None
    match = _AGE.fullmatch(value.strip())
    if match is None:
        raise click.BadParameter(f"expected an age such as 90min, 12h, 30d or 4w, got {value!r}")
    return float(match[1]) * _SECONDS[match[2]]


def _archs(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str] | None:
    given = names(ctx, param, value)
    if given is None:
        return None
    from mlagen.spec.arch import parse_arch

    return [str(parse_arch(name)) for name in given]


def _families(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str] | None:
    given = names(ctx, param, value)
    if given is None:
        return None
    from mlagen.spec.families import require_families

    require_families(given)
    return given


arch_option = values_option(
    "arch",
    _archs,
    "ARCH",
    "Targets, such as sm_90a.",
    parameter="archs",
    shell_complete=completer(arch_names),
)
family_option = values_option(
    "family",
    _families,
    "NAME",
    "Kernel families, such as mla_sm80.",
    parameter="families",
    shell_complete=completer(family_names),
)
toolchain_option = values_option(
    "toolchain",
    names,
    "NAME",
    "Compilers, such as nvrtc-13.0.88; nvrtc-13 matches any 13.x.",
    parameter="toolchains",
)
age_option = click.option(
    "--older-than",
    "age_s",
    callback=age,
    metavar="AGE",
    help="Last used longer ago than this, such as 12h or 30d.",
)
layers_option = click.option("--layers", is_flag=True, help="Read-only layers too.")


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
    requested one, and its damage shows when it is read. Raises ArgumentError if a key names no
    entry, a filter value matches none, or the selection is empty.
    """
    found = list(_named(store, keys, layers=layers))
    for label, values in (choice or Choice()).requested().items():
        present = set().union(*(names_of(stored, label) for stored in found))
        for value in values:
            if value not in present:
                cached = ", ".join(sorted(present)) or "nothing"
                raise ArgumentError(f"{label}: expected a cached one ({cached}), got {value!r}")
        names = ((stored, names_of(stored, label)) for stored in found)
        found = [stored for stored, own in names if not own or not own.isdisjoint(values)]
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
