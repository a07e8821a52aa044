"""Shell completion of values with commas between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def completer(values: Callable[[], Iterable[str]]) -> Completer:
    """Return what completes the last of several values; ``values`` is called when one is needed."""

    def complete(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[str]:
        before, comma, last = typed.rpartition(",")
        found = (value for value in values() if value.lower().startswith(last.lower()))
        return [f"{before}{comma}{value}" for value in found]

    return complete


def arch_names() -> list[str]:
    """Return the targets, and the cards that stand for them."""
    from mlagen.spec.arch import ARCHS
    from mlagen.spec.cards import CARDS

    return [*map(str, ARCHS), *CARDS]


def family_names() -> list[str]:
    """Return the kernel families."""
    from mlagen.spec.families import FAMILIES

    return list(FAMILIES)


def model_names() -> list[str]:
    """Return the models that are known by name."""
    from mlagen.models.names import known_names

    return list(known_names())
