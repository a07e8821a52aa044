"""Filter options shared by the commands that select entries."""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ..tools.completion import arch_names, completer, family_names
from .options import names

if TYPE_CHECKING:
    from mlagen.cache.catalog import StoredEntry

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


def arch_option(command: Command) -> Command:
    """Add ``--arch``."""
    return click.option(
        "--arch",
        "archs",
        callback=_archs,
        metavar="ARCH,...",
        shell_complete=completer(arch_names),
        help="Targets, such as sm_90a.",
    )(command)


def family_option(command: Command) -> Command:
    """Add ``--family``."""
    return click.option(
        "--family",
        "families",
        callback=_families,
        metavar="NAME,...",
        shell_complete=completer(family_names),
        help="Kernel families, such as mla_sm80.",
    )(command)


def toolchain_option(command: Command) -> Command:
    """Add ``--toolchain``."""
    return click.option(
        "--toolchain",
        "toolchains",
        callback=names,
        metavar="NAME,...",
        help="Compilers, such as nvrtc-13.0.88; nvrtc-13 matches any 13.x.",
    )(command)


def age_option(command: Command) -> Command:
    """Add ``--older-than``."""
    return click.option(
        "--older-than",
        "age_s",
        callback=age,
        metavar="AGE",
        help="Last used longer ago than this, such as 12h or 30d.",
    )(command)


def layers_option(command: Command) -> Command:
    """Add ``--layers``."""
    return click.option("--layers", is_flag=True, help="Read-only layers too.")(command)


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
