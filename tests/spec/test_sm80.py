"""The specs of the sm80 kernels: tiles, counts, and the tables of supported variants."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from mlagen.errors import UnsupportedError
from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.dtype import DType
from mlagen.spec.families import specs_of
from mlagen.spec.gqa.variant import SUPPORTED as GQA_SUPPORTED
from mlagen.spec.kernel import CallShape
from mlagen.spec.mla.sm80 import TILES, mla_sm80_spec
from mlagen.spec.mla.variant import SUPPORTED, MlaVariant, require_supported
from tests.kernels import gqa_sm80, mla_sm80

# The driver reserves 1 KiB per CTA, and an SM has 1 KiB more than the limit of a CTA.
RESERVED_BYTES = 1024
HEAD_DIMS = (*range(16, 257, 16), 512)
ROWS = (1, 8, 16, 17, 32, 33, 64, 65, 128, 256, 1024)
BF16 = MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16)
VARIANTS = [variant for row in SUPPORTED for variant in row.variants()]
E4M3 = {"query_dtype": DType.E4M3, "kv_dtype": DType.E4M3}
PER_TOKEN = {"query_dtype": DType.FP8_PER_TOKEN, "kv_dtype": DType.FP8_PER_TOKEN}
archs = pytest.mark.parametrize("arch", ARCHS, ids=str)


def fits(spec: Any) -> bool:
    """Whether all CTAs of an SM fit its shared memory."""
    per_sm = (spec.shared_bytes + RESERVED_BYTES) * spec.tile.ctas_per_sm
    return bool(per_sm <= spec.arch.shared_bytes + RESERVED_BYTES)


@archs
def test_every_supported_mla_call_has_a_listed_tile_that_fits(arch: Arch) -> None:
    """Each kernel is listed once, and all CTAs of an SM fit its shared memory."""
    specs = {mla_sm80_spec(arch, variant, rows) for variant in VARIANTS for rows in ROWS}

    listed = list(specs_of(arch, ["mla_sm80"]))

    assert len(listed) == len(specs)
    assert set(listed) == specs
    assert all(map(fits, specs))


@archs
def test_every_supported_gqa_call_has_a_tile_that_fits(arch: Arch) -> None:
    """So it is for any rows and head dim; kernels without token scales are listed, once."""
    for row, rows, head_dim in product(GQA_SUPPORTED, ROWS, HEAD_DIMS):
        dtypes: dict[str, Any] = {"query_dtype": row.query_dtype, "kv_dtype": row.kv_dtype}
        for out_dtype in row.out_dtypes:
            dtypes |= {"out_dtype": out_dtype, "head_dim": head_dim}
            spec = gqa_sm80(arch=arch, rows=rows, **dtypes)
            assert fits(spec)
            assert spec.slice_dims * spec.slices == head_dim

    listed: list[Any] = specs_of(arch, ["gqa_sm80"])

    pairs = {(spec.variant.query_dtype, spec.variant.kv_dtype) for spec in listed}
    assert len(listed) == len(set(listed))
    assert pairs == {
        (row.query_dtype, row.kv_dtype)
        for row in GQA_SUPPORTED
        if not row.kv_dtype.has_token_scales
    }


@archs
def test_a_call_uses_the_smallest_tile_that_holds_its_rows(arch: Arch) -> None:
    """No smaller tile of the architecture holds the rows, and only the largest may be exceeded."""
    of_mla = sorted({mla_sm80(arch=arch, rows=tile.block_m).tile.block_m for tile in TILES})
    families: list[tuple[Any, list[int]]] = [(mla_sm80, of_mla), (gqa_sm80, [16, 32])]
    for build, heights in families:
        for rows in ROWS:
            chosen = build(arch=arch, rows=rows).tile.block_m
            assert chosen == next((height for height in heights if height >= rows), heights[-1])


def test_the_dimensions_of_deepseek() -> None:
    """A query has latent and rope, a value the latent part, and a CTA whole warps."""
    spec = mla_sm80(rows=128)

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


TWO_TOKENS = CallShape(heads=16, q_len=2)
SERVED: dict[str, tuple[Any, CallShape, set[int]]] = {
    "query tokens times heads": (mla_sm80, TWO_TOKENS, {32}),
    "heads of one token in a sparse call": (partial(mla_sm80, lookup="sparse"), TWO_TOKENS, {16}),
    "heads of a KV head": (gqa_sm80, CallShape(heads=64, kv_heads=8, q_len=1), {16}),
    "many heads of a KV head": (gqa_sm80, CallShape(heads=64, kv_heads=1, q_len=1), {32}),
    "any, without KV heads": (gqa_sm80, CallShape(heads=64, q_len=1), {16, 32}),
}


@pytest.mark.parametrize(("build", "call", "served"), SERVED.values(), ids=SERVED)
def test_a_call_is_served_by_the_tile_of_its_rows(
    build: Any, call: CallShape, served: set[int]
) -> None:
    """Prewarming for a call selects the kernel that the call uses."""
    kernels = [build(rows=tile.block_m) for tile in TILES]

    assert {spec.tile.block_m for spec in kernels if spec.serves(call)} == served


def test_every_listed_variant_is_supported_once() -> None:
    """Each variant is in one row of the table, and page sizes beyond the listed ones pass."""
    assert len(VARIANTS) == len(set(VARIANTS))
    for variant in (*VARIANTS, replace(BF16, page_size=48)):
        require_supported(variant)
        assert sum(row.covers(variant) for row in SUPPORTED) == 1


DIMS = "(kv_lora_rank, qk_rope_head_dim)"
PAIRS = (
    "query bf16, cache bf16; query fp16, cache fp16; query e4m3, cache e4m3; "
    "query bf16, cache e4m3; query fp16, cache e4m3; query bf16, cache fp8_ds_mla; "
    "query fp16, cache fp8_ds_mla; query e4m3, cache fp8_ds_mla; "
    "query fp8_per_token, cache fp8_per_token"
)
DIMS_THERE = "supported there: (512, 64)"
GQA_ROWS = [f"query {row.query_dtype}, cache {row.kv_dtype}, output" for row in GQA_SUPPORTED]
GQA_DIMS = "head_dim {}; supported: multiples of 16 up to 256, and 512"
UNSUPPORTED: list[tuple[Any, dict[str, Any], list[str]]] = [
    (
        mla_sm80,
        {"kv_dtype": DType.FP16},
        [f"query bf16, cache fp16; supported with lookup paged: {PAIRS}"],
    ),
    (mla_sm80, {"kv_lora_rank": 384}, [f"{DIMS} (384, 64)", DIMS_THERE]),
    (mla_sm80, {**PER_TOKEN, "qk_rope_head_dim": 0}, [f"{DIMS} (512, 0)"]),
    (mla_sm80, {**PER_TOKEN, "lookup": "sparse"}, ["; supported with lookup sparse: query bf16, "]),
    (
        mla_sm80,
        {"lookup": "two_pools"},
        ["; supported with lookup two_pools: query bf16, cache fp8_dsv4; "],
    ),
    (mla_sm80, {"lookup": "sparse", "mask": "bias"}, ["(sparse, shared, bias)", DIMS_THERE]),
    (mla_sm80, {"kv_dtype": DType.FP8_DS_MLA, "values": "separate"}, ["(paged, separate, causal)"]),
    (gqa_sm80, {"kv_dtype": DType.FP16}, GQA_ROWS),
    (gqa_sm80, {"out_dtype": DType.E4M3}, GQA_ROWS),
    (gqa_sm80, E4M3, GQA_ROWS),
    *((gqa_sm80, {"head_dim": dim}, [GQA_DIMS.format(dim)]) for dim in (0, 8, 40, 272, 320, 1024)),
]


@pytest.mark.parametrize(("build", "changes", "lines"), UNSUPPORTED)
def test_an_unsupported_variant_lists_what_is_supported(
    build: Any, changes: dict[str, Any], lines: list[str]
) -> None:
    """The message has the dtypes of the table, or the dims and forms that their row supports."""
    with pytest.raises(UnsupportedError, match=r"^no (MLA|GQA) decode kernel for ") as caught:
        build(**changes)

    for line in lines:
        assert line in str(caught.value)
