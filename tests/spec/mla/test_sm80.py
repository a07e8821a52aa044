"""The specs of the sm80 MLA kernels, and the table of supported variants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlagen.errors import UnsupportedError
from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import CallShape
from mlagen.spec.mla.sm80 import TILES, mla_sm80_spec, mla_sm80_specs
from mlagen.spec.mla.variant import SUPPORTED, MlaVariant, require_supported
from tests.kernels import SM_80, SM_90A, mla_sm80

# The driver reserves 1 KiB per CTA, and an SM has 1 KiB more than the limit of a CTA.
RESERVED_BYTES = 1024
ROWS = (1, 8, 16, 17, 32, 33, 64, 65, 128, 256, 1024)
BF16 = MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16)
VARIANTS = [variant for row in SUPPORTED for variant in row.variants()]
PAIRS = (
    "query bf16, cache bf16; query fp16, cache fp16; query e4m3, cache e4m3; "
    "query bf16, cache e4m3; query fp16, cache e4m3; query bf16, cache fp8_ds_mla; "
    "query fp16, cache fp8_ds_mla; query e4m3, cache fp8_ds_mla; "
    "query fp8_per_token, cache fp8_per_token"
)
E4M3 = {"query_dtype": DType.E4M3, "kv_dtype": DType.E4M3}
PER_TOKEN = {"query_dtype": DType.FP8_PER_TOKEN, "kv_dtype": DType.FP8_PER_TOKEN}


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_every_supported_call_has_a_listed_tile_that_fits(arch: Arch) -> None:
    """Each kernel is listed once, and all CTAs of an SM fit its shared memory."""
    specs = {mla_sm80_spec(arch, variant, rows) for variant in VARIANTS for rows in ROWS}

    listed = list(mla_sm80_specs(arch))

    assert len(listed) == len(specs)
    assert set(listed) == specs
    for spec in specs:
        per_sm = (spec.shared_bytes + RESERVED_BYTES) * spec.tile.ctas_per_sm
        assert per_sm <= arch.shared_bytes + RESERVED_BYTES


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_a_call_uses_the_smallest_tile_that_holds_its_rows(arch: Arch) -> None:
    """No smaller tile of the architecture holds the rows, and only the largest may be exceeded."""
    heights = sorted({mla_sm80(arch=arch, rows=tile.block_m).tile.block_m for tile in TILES})

    for rows in ROWS:
        chosen = mla_sm80(arch=arch, rows=rows).tile.block_m
        assert chosen == next((height for height in heights if height >= rows), heights[-1])


def test_the_dimensions_of_deepseek() -> None:
    """A query has latent and rope, a value the latent part, and a CTA whole warps."""
    spec = mla_sm80(arch=SM_90A, rows=128)

    assert (spec.head_dim_qk, spec.head_dim_vo) == (576, 512)
    assert spec.threads % 32 == 0
    assert spec.threads <= 1024


@pytest.mark.parametrize(
    ("changes", "math_dtype", "out_dtype"),
    [
        ({}, DType.BF16, DType.BF16),
        ({"query_dtype": DType.FP16, "kv_dtype": DType.E4M3}, DType.FP16, DType.FP16),
        (E4M3, DType.FP16, DType.BF16),
        ({"kv_dtype": DType.FP8_DS_MLA}, DType.BF16, DType.BF16),
        ({**E4M3, "kv_dtype": DType.FP8_DS_MLA}, DType.BF16, DType.BF16),
        (PER_TOKEN, DType.BF16, DType.BF16),
    ],
)
def test_math_and_output_dtypes(
    changes: dict[str, Any], math_dtype: DType, out_dtype: DType
) -> None:
    """A 16-bit query is multiplied as stored, e4m3 without scales in fp16; FP8 has bf16 output."""
    spec = mla_sm80(**changes)

    assert (spec.math_dtype, spec.out_dtype) == (math_dtype, out_dtype)


@pytest.mark.parametrize(("lookup", "rows"), [("paged", 32), ("sparse", 16)])
def test_a_sparse_call_has_the_rows_of_one_token(lookup: str, rows: int) -> None:
    """Two query tokens of sixteen heads are 32 rows, or twice 16 in a sparse call."""
    call = CallShape(heads=16, q_len=2)

    kernels = {mla_sm80(arch=SM_80, lookup=lookup, rows=tile.block_m) for tile in TILES}

    assert {spec.tile.block_m for spec in kernels if spec.serves(call)} == {rows}


def test_every_listed_variant_is_supported_once() -> None:
    """Each variant is in one row of the table, and page sizes beyond the listed ones pass."""
    assert len(VARIANTS) == len(set(VARIANTS))
    for variant in (*VARIANTS, replace(BF16, page_size=48)):
        require_supported(variant)
        assert sum(row.covers(variant) for row in SUPPORTED) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_dtype": DType.FP16}, f"query bf16, cache fp16; supported: {PAIRS}"),
        ({"kv_lora_rank": 384}, "(kv_lora_rank, qk_rope_head_dim) (384, 64)"),
        ({**PER_TOKEN, "qk_rope_head_dim": 0}, "(kv_lora_rank, qk_rope_head_dim) (512, 0)"),
        ({"lookup": "sparse", "mask": "bias"}, "(sparse, shared, bias)"),
        ({"kv_dtype": DType.FP8_DS_MLA, "values": "separate"}, "(paged, separate, causal)"),
    ],
)
def test_an_unsupported_variant_lists_what_is_supported(
    changes: dict[str, Any], message: str
) -> None:
    """The message lists the dtype pairs of the table, or what their row supports."""
    with pytest.raises(UnsupportedError, match=r"^no MLA decode kernel for query ") as caught:
        require_supported(replace(BF16, **changes))

    assert message in str(caught.value)
    assert "kv_dtype" in changes or "supported there: (512, 64)" in str(caught.value)
