"""Options with comma-separated values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import click

from mlagen.values import INT32_MAX, shown

Callback: TypeAlias = Callable[[click.Context, click.Parameter, str | None], list[int] | None]


def names(_ctx: click.Context, _param: click.Parameter, value: str | None) -> list[str] | None:
    """Parse comma-separated values."""
    return None if value is None else [item.strip() for item in value.split(",")]


def numbers(minimum: int) -> Callback:
    """Return a callback that parses comma-separated numbers from ``minimum`` to int32's last."""

    def is_valid(item: str) -> bool:
        # Python does not parse thousands of digits.
        is_short = len(item) <= len(str(INT32_MAX))
        return item.isdecimal() and is_short and minimum <= int(item) <= INT32_MAX

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
        items = names(ctx, param, value)
        if items is None:
            return None
        if not all(map(is_valid, items)):
            rule = f"numbers from {minimum} to {INT32_MAX}, with commas"
            raise click.BadParameter(f"expected {rule}, got {shown(value)}")
        return [int(item) for item in items]

    return read


def values_option(
    name: str, callback: Callable[..., Any], metavar: str, text: str, **options: Any
) -> Callable[[Any], Any]:
    """Return the decorator of ``--name``; ``parameter`` is its name in the function, if another."""
    parameter = options.pop("parameter", None)
    flags = [f"--{name}"] if parameter is None else [f"--{name}", parameter]
    return click.option(*flags, callback=callback, metavar=f"{metavar},...", help=text, **options)
