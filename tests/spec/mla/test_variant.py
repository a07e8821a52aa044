"""Tests of the support table of MLA decode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlagen.errors import UnsupportedError
from mlagen.spec.dtype import DType
from mlagen.spec.mla.variant import SUPPORTED, MlaVariant, require_supported

BF16 = MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16)


def test_no_variant_is_listed_twice() -> None:
    """Each variant is in one row of the table."""
    listed = [variant for row in SUPPORTED for variant in row.variants()]

    assert len(listed) == len(set(listed))


def test_every_listed_variant_is_supported() -> None:
    """The check accepts every variant of every row."""
    for row in SUPPORTED:
        for variant in row.variants():
            require_supported(variant)
            assert row.covers(variant)


def test_any_page_size_is_supported() -> None:
    """Page sizes beyond the prewarmed ones are supported."""
    odd = replace(BF16, page_size=48)

    require_supported(odd)

    assert SUPPORTED[0].covers(odd)


def test_unsupported_dtypes_list_the_supported_ones() -> None:
    """The message lists the dtype pairs of the table."""
    with pytest.raises(UnsupportedError) as caught:
        require_supported(replace(BF16, kv_dtype=DType.FP16))

    assert str(caught.value) == (
        "no MLA decode kernel for query bf16, cache fp16; supported: query bf16, cache bf16; "
        "query fp16, cache fp16; query e4m3, cache e4m3; query bf16, cache e4m3; "
        "query fp16, cache e4m3; query bf16, cache fp8_ds_mla; query fp16, cache fp8_ds_mla; "
        "query fp8_per_token, cache fp8_per_token"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_lora_rank": 384},
        {"query_dtype": DType.E4M3, "kv_dtype": DType.E4M3, "qk_rope_head_dim": 0},
        {"lookup": "sparse", "mask": "bias"},
        {"kv_dtype": DType.FP8_DS_MLA, "values": "separate"},
    ],
    ids=["another rank", "e4m3 without rope", "a sparse bias", "fp8_ds_mla with separate values"],
)
def test_an_unsupported_variant_lists_what_its_row_supports(changes: dict[str, Any]) -> None:
    """The message lists the head dims and modes that the dtypes support."""
    variant = replace(BF16, **changes)
    row = next(
        row
        for row in SUPPORTED
        if (row.query_dtype, row.kv_dtype) == (variant.query_dtype, variant.kv_dtype)
    )

    with pytest.raises(UnsupportedError) as caught:
        require_supported(variant)

    message = str(caught.value)
    assert f"({variant.kv_lora_rank}, {variant.qk_rope_head_dim})" in message
    assert f"({variant.lookup}, {variant.values}, {variant.mask})" in message
    assert all(str(dims) in message for dims in row.head_dims)
