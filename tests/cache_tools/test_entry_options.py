"""Filter options: parsing and matching."""

from __future__ import annotations

import time
from pathlib import Path

import click
import pytest

from cache_tools.options.entry_options import Choice, age, is_older, names_of
from mlagen.cache.default_store import kernel_store

from .altered import use
from .many import TOOLCHAIN, fill

CONTEXT = click.Context(click.Command("any"))
OPTION = click.Option(["--any"])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1.5 min", 90), ("12h", 43_200), (" 30d", 2_592_000), ("2w", 1_209_600)],
)
def test_an_age_is_parsed_with_its_unit(text: str, seconds: float) -> None:
    """Blanks are ignored."""
    assert age(CONTEXT, OPTION, text) == seconds


def test_no_age_is_no_limit() -> None:
    """Without the option no age is checked."""
    assert age(CONTEXT, OPTION, None) is None


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1e3s", "1 month", "1d 2h"])
def test_an_invalid_age_is_rejected(text: str) -> None:
    """The message has an example and the value."""
    with pytest.raises(click.BadParameter, match="expected an age such as 90min") as caught:
        age(CONTEXT, OPTION, text)

    assert caught.value.message.endswith(f"got {text!r}")


@pytest.mark.parametrize(
    ("choice", "is_left"),
    [
        (Choice(), True),
        (Choice(archs=["sm_80", "sm_90a"]), True),
        (Choice(archs=["sm_80"]), False),
        (Choice(families=["combine"]), True),
        (Choice(families=["mla_sm80"]), False),
        (Choice(toolchains=[TOOLCHAIN]), True),
        (Choice(toolchains=["nvrtc-13"]), True),
        (Choice(toolchains=["nvrtc-13.0.88", "nvrtc-12"]), False),
        (Choice(age_s=60), True),
        (Choice(age_s=600), False),
        (Choice(archs=["sm_90a"], age_s=600), False),
    ],
    ids=repr,
)
def test_all_filters_have_to_match(choice: Choice, is_left: bool, cache_dir: Path) -> None:
    """An entry matches one value of each filter, and the age."""
    fill(cache_dir, 1)
    use(next(cache_dir.glob("v1/e/*/*/*")), age_s=300, now=time.time())

    (stored,) = kernel_store().entries()

    assert choice.matches(stored) is is_left


def test_a_damaged_entry_has_only_its_toolchain(cache_dir: Path) -> None:
    """Target and family are in the manifest, the compiler is in the path; the age is infinite."""
    fill(cache_dir, 1)
    next(cache_dir.glob("v1/e/*/*/*/manifest.json")).unlink()

    (stored,) = kernel_store().entries()

    assert names_of(stored, "toolchain") == {TOOLCHAIN, "nvrtc-13"}
    assert names_of(stored, "arch") == names_of(stored, "family") == set()
    assert is_older(stored, 1e9)
