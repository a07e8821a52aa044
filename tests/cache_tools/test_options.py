"""Options with comma-separated values."""

from __future__ import annotations

import click
import pytest

from cache_tools.options.options import names, numbers

CONTEXT = click.Context(click.Command("any"))
OPTION = click.Option(["--any"])


def test_names_are_split_at_commas() -> None:
    """Blanks are ignored, and a missing option is None."""
    assert names(CONTEXT, OPTION, "bf16, fp16") == ["bf16", "fp16"]
    assert names(CONTEXT, OPTION, None) is None


def test_numbers_start_at_the_minimum() -> None:
    """The minimum itself is valid."""
    assert numbers(0)(CONTEXT, OPTION, "0,64") == [0, 64]
    assert numbers(1)(CONTEXT, OPTION, None) is None


@pytest.mark.parametrize("value", ["0", "1,big", "-1", ""])
def test_an_invalid_number_is_rejected(value: str) -> None:
    """The message has the rule and the value."""
    with pytest.raises(click.BadParameter) as caught:
        numbers(1)(CONTEXT, OPTION, value)

    assert caught.value.message == f"expected numbers from 1 on, with commas, got {value!r}"
