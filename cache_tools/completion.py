"""Shell completion of comma-separated values."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def completer(values: Callable[[], Iterable[str]]) -> Completer:
    """Return a completer of the last value; ``values`` is called on demand."""

    def complete(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[str]:
        before, comma, last = typed.rpartition(",")
        found = (value for value in values() if value.lower().startswith(last.lower()))
        return [f"{before}{comma}{value}" for value in found]

    return complete


def arch_names() -> list[str]:
    """Return the targets, and the GPU names that map to them."""
    from mlagen.spec.arch import ARCHS
    from mlagen.spec.cards import CARDS

    return [*map(str, ARCHS), *CARDS]


def family_names() -> list[str]:
    """Return the kernel families."""
    from mlagen.spec.families import FAMILIES

    return list(FAMILIES)


def model_names() -> list[str]:
    """Return the names of the known models."""
    from mlagen.models.names import known_names

    return list(known_names())
