"""Tests of the supported kernels of an architecture and their filters."""

from __future__ import annotations

import pytest

from mlagen.errors import ArgumentError
from mlagen.spec.families import FAMILIES, specs_of
from tests.kernels import SM_90A


def test_without_filters_every_family_is_listed() -> None:
    """Every kernel is listed once."""
    specs = specs_of(SM_90A)

    assert len(specs) == len(set(specs))
    assert {spec.family for spec in specs} == set(FAMILIES)
    assert {spec.arch for spec in specs} == {SM_90A}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_selects_its_kernels(family: str) -> None:
    """A family name selects the kernels of that family only."""
    specs = specs_of(SM_90A, (family,))

    assert specs
    assert {spec.family for spec in specs} == {family}


def test_a_filter_selects_matching_values() -> None:
    """A kernel matches if each of its key fields has one of the given values."""
    specs = specs_of(SM_90A, ("mla_sm80",), page_size=("64", "1"), query_dtype=("fp16",))

    values = [(spec.key_fields()["page_size"], spec.key_fields()["query_dtype"]) for spec in specs]
    assert set(values) == {("64", "fp16"), ("1", "fp16")}


def test_a_kernel_without_the_field_passes_the_filter() -> None:
    """A combine kernel has no page size, so a page-size filter keeps it."""
    specs = specs_of(SM_90A, page_size=("64",))

    every_combine = specs_of(SM_90A, ("combine",))
    assert [spec for spec in specs if spec.family == "combine"] == every_combine


@pytest.mark.parametrize(
    ("families", "wanted", "message"),
    [
        (
            ("mla_sm80", "mla"),
            {},
            (
                "family: expected one of mla_sm80, mla_sm90, mla_sm90_fp8, "
                "mla_sm90_fp8kv, gqa_sm80, gqa_sm90, combine, got 'mla'"
            ),
        ),
        (
            ("mla_sm80",),
            {"page_size": ("48",)},
            "page_size: expected one of 1, 8, 16, 32, 64, 128, got '48'",
        ),
        (
            ("mla_sm80", "combine"),
            {"query_dtype": ("bf16", "int8")},
            "query_dtype: expected one of bf16, fp16, e4m3, fp8_per_token, got 'int8'",
        ),
    ],
    ids=["an unknown family", "an unknown page size", "an unknown dtype"],
)
def test_a_value_that_no_kernel_has_is_rejected(
    families: tuple[str, ...], wanted: dict[str, tuple[str, ...]], message: str
) -> None:
    """The message has the filter, the known values and the given one."""
    with pytest.raises(ArgumentError) as caught:
        specs_of(SM_90A, families, **wanted)

    assert str(caught.value) == message
