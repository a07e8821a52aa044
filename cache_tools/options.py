"""How options with several values are read: with commas between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import click

Callback: TypeAlias = Callable[[click.Context, click.Parameter, str | None], list[int] | None]


def names(_ctx: click.Context, _param: click.Parameter, value: str | None) -> list[str] | None:
    """Read values with commas between them."""
    return None if value is None else [item.strip() for item in value.split(",")]


def numbers(least: int) -> Callback:
    """Return what reads numbers with commas between them."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
        items = names(ctx, param, value)
        if items is None:
            return None
        if not all(item.isdecimal() and int(item) >= least for item in items):
            raise click.BadParameter(
                f"expected numbers from {least} on, with commas, got {value!r}"
            )
        return [int(item) for item in items]

    return read
