"""The supported kernels of an architecture, their filters, and their selection by calls."""

from __future__ import annotations

from typing import Any

import pytest

from mlagen.errors import ArgumentError
from mlagen.spec.arch import Arch
from mlagen.spec.families import FAMILIES, select_specs, specs_of
from mlagen.spec.kernel import KernelSpec
from tests.kernels import SM_80, SM_90A, mla_sm80, mla_sm90


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


def default_kernels(arch: Arch, *families: str) -> list[KernelSpec]:
    """Return the kernels that match the default filters."""
    chosen = families or tuple(FAMILIES)
    forms = {"lookup": ("paged",), "values": ("shared",), "mask": ("causal",)}
    known = forms if "mla_sm80" in chosen else {}
    return specs_of(arch, chosen, **known)


def test_without_filters_every_default_kernel_is_selected() -> None:
    """Kernels of the default variants are selected once, in the order of the architectures."""
    selected = select_specs([SM_90A, SM_80, SM_90A], wanted={})

    assert selected == [*default_kernels(SM_90A), *default_kernels(SM_80)]


def test_a_variant_is_selected_by_name() -> None:
    """A value for a field replaces the default filter."""
    selected = select_specs([SM_90A], families=["mla_sm80"], wanted={"lookup": "sparse"})

    assert selected == specs_of(
        SM_90A, ("mla_sm80",), lookup=("sparse",), values=("shared",), mask=("causal",)
    )


@pytest.mark.parametrize(
    ("wanted", "key_fields"),
    [
        ({"dtype": "bf16"}, {"query_dtype": {"bf16"}, "dtype": {"bf16"}}),
        (
            {"kv_lora_rank": 512},
            {"kv_lora_rank": {"512"}, "head_dim_vo": {"0", "64", "128", "256", "512"}},
        ),
        ({"page_size": [32, 64]}, {"page_size": {"32", "64"}}),
        ({"query_dtype": "fp16"}, {"query_dtype": {"fp16"}, "dtype": {"bf16", "fp16", "e4m3"}}),
        ({"dtype": "e4m3"}, {"query_dtype": {"e4m3"}, "dtype": {"bf16"}}),
        ({"head_dim": 64, "kv_lora_rank": 256}, {"head_dim_vo": {"0", "64", "256"}}),
    ],
)
def test_a_filter_selects_the_kernels_of_matching_calls(
    wanted: dict[str, Any], key_fields: dict[str, set[str]]
) -> None:
    """A filter of calls matches the key field of each family; a key field matches itself."""
    selected = select_specs([SM_90A], wanted=wanted)

    for name, values in key_fields.items():
        found = {spec.key_fields()[name] for spec in selected if name in spec.key_fields()}
        assert found == values
    assert {"mla_sm80", "combine"} <= {spec.family for spec in selected}


@pytest.mark.parametrize(
    ("family", "heads", "q_len", "block_m"),
    [
        ("mla_sm80", 16, None, {16}),
        ("mla_sm80", 128, None, {64}),
        ("mla_sm80", [16, 128], [1, 2], {16, 32, 64}),
        # The tile is the smallest that holds the rows, or the largest, and those of small calls.
        ("mla_sm90", 16, None, {16}),
        ("mla_sm90", 17, None, {16, 32}),
        ("mla_sm90", 128, None, {16, 64}),
        ("mla_sm90", [8, 32], [1, 3], {16, 32, 64}),
    ],
)
def test_heads_and_q_len_select_the_tiles_of_the_calls(
    family: str, heads: Any, q_len: Any, block_m: set[int]
) -> None:
    """The selected kernels are those that the entry point would use."""
    wanted: dict[str, Any] = {"query_dtype": "bf16", "kv_dtype": "bf16", "page_size": 64}
    wanted |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}

    selected = select_specs([SM_90A], families=[family], heads=heads, q_len=q_len, wanted=wanted)

    build = mla_sm80 if family == "mla_sm80" else mla_sm90
    assert set(selected) == {build(rows=rows) for rows in block_m}


def test_a_family_of_another_arch_selects_nothing() -> None:
    """An sm90 family has no sm_80 kernel, but its filters stay valid."""
    wanted: dict[str, Any] = {"dtype": "bf16"}

    both = select_specs([SM_80, SM_90A], families=["mla_sm90"], wanted=wanted)

    assert select_specs([SM_80], families=["mla_sm90"], wanted=wanted) == []
    assert both == select_specs([SM_90A], families=["mla_sm90"], wanted=wanted)


def test_only_other_kernels_serve_more_heads_than_mla() -> None:
    """An MLA call has 256 heads at most."""
    for heads, has_mla in ((256, True), (257, False)):
        selected = select_specs([SM_90A], heads=heads, wanted={"dtype": "bf16", "page_size": 64})

        families = {spec.family for spec in selected}
        assert {"mla_sm80", "mla_sm90"} <= families or not has_mla
        assert any("mla" in family for family in families) is has_mla
        assert {"gqa_sm80", "gqa_sm90"} <= families


def test_a_combine_kernel_matches_any_heads() -> None:
    """A combine kernel does not depend on the heads."""
    selected = select_specs([SM_80], families=["combine"], heads=16, wanted={})

    assert selected == default_kernels(SM_80, "combine")


WHOLE = "expected an int, 1 or more"
CALL_FIELDS = (
    "dtype, kv_lora_rank, head_dim, page_size, batch_invariant, has_output_gate, head_dim_vo"
)
REJECTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"family: expected one of {', '.join(FAMILIES)}, got 'mla'": ({"families": ["mla"]}, {}),
    "query_dtype: expected one of bf16, fp16, e4m3, fp8_per_token, got 'int8'": (
        {"families": ["mla_sm80", "combine"]},
        {"query_dtype": ["bf16", "int8"]},
    ),
    f"heads: {WHOLE}, got 0": ({"heads": 0}, {}),
    f"q_len: {WHOLE}, got -1": ({"heads": 1, "q_len": [1, -1]}, {}),
    "q_len: expected heads beside it, got 2 alone": ({"q_len": 2}, {}),
    "kv_heads: expected heads beside it, got 2 alone": ({"kv_heads": 2}, {}),
    "heads: expected a multiple of kv_heads 2, got 3": ({"heads": 3, "kv_heads": 2}, {}),
    "heads: expected 256 or less for MLA kernels, got 300": (
        {"families": ["mla_sm80", "mla_sm90"], "heads": [16, 300]},
        {},
    ),
    "page_size: expected one of 1, 8, 16, 32, 64, 128, got '48'": ({}, {"page_size": 48}),
    f"filter: expected one of {CALL_FIELDS}, got 'batch'": (
        {"families": ["combine"]},
        {"batch": 1},
    ),
}


@pytest.mark.parametrize(
    ("message", "arguments", "wanted"), [(text, *call) for text, call in REJECTED.items()]
)
def test_an_invalid_argument_is_rejected(
    message: str, arguments: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """The message has the argument, the rule and the value."""
    with pytest.raises(ArgumentError) as raised:
        select_specs([SM_80], **arguments, wanted=wanted)

    assert str(raised.value) == message
