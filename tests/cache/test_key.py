"""The cache key: stable, complete, and explainable."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlagen.cache import key as key_module
from mlagen.cache.key import CacheKey
from tests.cache.builds import make_key
from tests.fixture_types import Patch

GOLDEN = "366b040f0683f11ef6ba7bf90a93cf8b9372e96827efd7e9a536745eb2cce23c"


def test_digest_never_changes() -> None:
    """The digest of these key fields is constant across machines and versions."""
    assert make_key().digest == GOLDEN


OTHER_INGREDIENTS = {
    "another value": (("family", "mla_sm80"), ("spec.page_size", "32")),
    "another label": (("family", "mla_sm80"), ("spec.head_dim", "64")),
    "one more": (("family", "mla_sm80"), ("spec.page_size", "64"), ("option.0", "")),
    "one less": (("family", "mla_sm80"),),
    "another order": (("spec.page_size", "64"), ("family", "mla_sm80")),
    "a border moved": (("family", "mla_decodes"), ("pec.page_size", "64")),
    "two pairs joined": (("family", 'mla_sm80"],["spec.page_size","64'),),
}


@pytest.mark.parametrize("key_fields", OTHER_INGREDIENTS.values(), ids=OTHER_INGREDIENTS)
def test_every_key_field_changes_the_digest(key_fields: tuple[tuple[str, str], ...]) -> None:
    """Two keys with different key fields never share a digest."""
    other = replace(make_key(), key_fields=key_fields)
    assert other.digest != make_key().digest


def test_schema_changes_the_digest(monkeypatch: Patch) -> None:
    """Another schema changes every digest."""
    before = make_key().digest
    monkeypatch.setattr(key_module, "SCHEMA", key_module.SCHEMA + 1)
    assert make_key().digest != before


def test_toolchain_is_not_part_of_the_digest() -> None:
    """A kernel has the same digest for every compiler."""
    other = make_key(toolchain="nvrtc-12.8.1")
    assert other.digest == make_key().digest
    assert other != make_key()


@pytest.mark.parametrize(
    ("wanted", "stored", "is_accepted"),
    [
        ("nvrtc-13", "nvrtc-13.5.37", True),
        ("nvrtc-1", "nvrtc-13.5.37", False),
        ("nvrtc-13.5.37", "nvrtc-13.5.37", True),
        ("nvrtc-13.5.3", "nvrtc-13.5.37", False),
        ("nvrtc-13.5", "nvrtc-13.5.37", False),
    ],
)
def test_a_key_names_one_compiler_or_a_major_version(
    wanted: str, stored: str, is_accepted: bool
) -> None:
    """Only a major version alone accepts several compilers, and versions are never cut off."""
    assert make_key(toolchain=wanted).accepts(stored) == is_accepted


def test_differences_name_each_label_with_both_values() -> None:
    """Changed, missing and additional key fields are distinguished; the toolchain comes last."""
    mine = CacheKey((("family", "mla"), ("page", "64"), ("old", "1")), "nvrtc-13.0.88")
    theirs = CacheKey((("family", "mla"), ("new", "2"), ("page", "32")), "nvrtc-13.5.37")

    differences = mine.differences(theirs)

    assert differences == [
        ("page", "64", "32"),
        ("old", "1", None),
        ("new", None, "2"),
        ("toolchain", "nvrtc-13.0.88", "nvrtc-13.5.37"),
    ]
    assert mine.differences(mine) == []


def test_an_ambiguous_key_is_rejected() -> None:
    """A duplicate label or a value that is not a string is rejected."""
    with pytest.raises(AssertionError, match="occurs twice"):
        CacheKey((("family", "a"), ("family", "b")), "nvrtc-13.5.37")
    with pytest.raises(AssertionError):
        CacheKey((("page", 64),), "nvrtc-13.5.37")  # type: ignore[arg-type]
