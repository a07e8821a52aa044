"""Tests of the supported kernels of an architecture and their filters."""

from __future__ import annotations

import pytest

from mlagen.errors import ArgumentError
from mlagen.spec.families import FAMILIES, specs_of
from tests.kernels import SM_90A


def test_without_filters_every_family_is_listed() -> None:
    """Every kernel is listed once, and a family's name selects its kernels."""
    specs = specs_of(SM_90A)

    assert len(specs) == len(set(specs))
    assert {spec.arch for spec in specs} == {SM_90A}
    for family in FAMILIES:
        of_family = specs_of(SM_90A, (family,))
        assert of_family == [spec for spec in specs if spec.family == family] != []


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


DTYPES = "bf16, fp16, e4m3, fp8_per_token"


@pytest.mark.parametrize(
    ("families", "wanted", "message"),
    [
        (("mla_sm80", "mla"), {}, f"family: expected one of {', '.join(FAMILIES)}, got 'mla'"),
        (("mla_sm80",), {"page_size": ("48",)}, "page_size: expected one of 1, 8, 16, 32, 64, 128"),
        (
            ("mla_sm80", "combine"),
            {"query_dtype": ("bf16", "int8")},
            f"query_dtype: expected one of {DTYPES}, got 'int8'",
        ),
    ],
)
def test_a_value_that_no_kernel_has_is_rejected(
    families: tuple[str, ...], wanted: dict[str, tuple[str, ...]], message: str
) -> None:
    """The message has the filter, the known values and the given one."""
    with pytest.raises(ArgumentError) as caught:
        specs_of(SM_90A, families, **wanted)

    assert str(caught.value).startswith(message)
