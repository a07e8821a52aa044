"""Callbacks for options with comma-separated values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import click

Callback: TypeAlias = Callable[[click.Context, click.Parameter, str | None], list[int] | None]


def names(_ctx: click.Context, _param: click.Parameter, value: str | None) -> list[str] | None:
    """Parse comma-separated values."""
    return None if value is None else [item.strip() for item in value.split(",")]


def numbers(minimum: int) -> Callback:
    """Return a callback that parses comma-separated numbers of ``minimum`` or more."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
        items = names(ctx, param, value)
        if items is None:
            return None
        if not all(item.isdecimal() and int(item) >= minimum for item in items):
            raise click.BadParameter(
                f"expected numbers from {minimum} on, with commas, got {value!r}"
            )
        return [int(item) for item in items]

    return read
