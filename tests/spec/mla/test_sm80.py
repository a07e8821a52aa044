"""Tests of the sm80 MLA specs: tile selection."""

from __future__ import annotations

import pytest

from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import CallShape
from mlagen.spec.mla.sm80 import TILES, mla_sm80_spec, mla_sm80_specs
from mlagen.spec.mla.variant import SUPPORTED, MlaSupport
from tests.kernels import SM_80, SM_90A, mla_sm80

# The driver reserves 1 KiB per CTA, and an SM has 1 KiB more than the limit of a CTA.
RESERVED_BYTES = 1024
ROWS = (1, 8, 16, 17, 32, 33, 64, 65, 128, 256, 1024)


def row_name(row: MlaSupport) -> str:
    """Return a readable name for a row of the support table."""
    return f"query {row.query_dtype}, cache {row.kv_dtype}"


@pytest.mark.parametrize("arch", ARCHS, ids=str)
@pytest.mark.parametrize("row", SUPPORTED, ids=row_name)
def test_every_supported_call_has_a_tile_that_fits(arch: Arch, row: MlaSupport) -> None:
    """For any number of rows and every variant, all CTAs of an SM fit its shared memory."""
    for variant in row.variants():
        for rows in ROWS:
            spec = mla_sm80_spec(arch, variant, rows)

            assert spec.shared_bytes <= arch.shared_bytes
            per_sm = (spec.shared_bytes + RESERVED_BYTES) * spec.tile.ctas_per_sm
            assert per_sm <= arch.shared_bytes + RESERVED_BYTES


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_a_call_uses_the_smallest_tile_that_holds_its_rows(arch: Arch) -> None:
    """No smaller tile of the architecture holds the rows, and only the largest may be exceeded."""
    heights = sorted({mla_sm80(arch=arch, rows=tile.block_m).tile.block_m for tile in TILES})

    for rows in ROWS:
        chosen = mla_sm80(arch=arch, rows=rows).tile.block_m
        assert chosen == next((height for height in heights if height >= rows), heights[-1])


def test_tiles_are_listed_largest_first() -> None:
    """Tile selection walks the table once and relies on its order."""
    heights = [tile.block_m for tile in TILES]

    assert heights == sorted(heights, reverse=True)


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_every_kernel_of_an_arch_is_listed_once(arch: Arch) -> None:
    """Prewarming lists exactly the kernels of calls with a default page size."""
    expected = {
        mla_sm80_spec(arch, variant, rows)
        for row in SUPPORTED
        for variant in row.variants()
        for rows in ROWS
    }

    listed = list(mla_sm80_specs(arch))

    assert len(listed) == len(set(listed))
    assert set(listed) == expected


def test_the_dimensions_of_deepseek() -> None:
    """A query has latent and rope, a value the latent part, and a CTA whole warps."""
    spec = mla_sm80(arch=SM_90A, rows=128)

    assert (spec.head_dim_qk, spec.head_dim_vo) == (576, 512)
    assert spec.threads % 32 == 0
    assert spec.threads <= 1024


@pytest.mark.parametrize(
    ("query_dtype", "kv_dtype", "math_dtype", "out_dtype"),
    [
        (DType.BF16, DType.BF16, DType.BF16, DType.BF16),
        (DType.FP16, DType.E4M3, DType.FP16, DType.FP16),
        (DType.E4M3, DType.E4M3, DType.FP16, DType.BF16),
        (DType.BF16, DType.FP8_DS_MLA, DType.BF16, DType.BF16),
        (DType.FP8_PER_TOKEN, DType.FP8_PER_TOKEN, DType.BF16, DType.BF16),
    ],
    ids=["bf16", "fp16 over e4m3", "e4m3", "656-byte rows", "640-byte rows"],
)
def test_math_and_output_dtypes(
    query_dtype: DType, kv_dtype: DType, math_dtype: DType, out_dtype: DType
) -> None:
    """A 16-bit query is multiplied as stored, e4m3 in fp16; an FP8 query has bf16 output."""
    spec = mla_sm80(query_dtype=query_dtype, kv_dtype=kv_dtype)

    assert (spec.math_dtype, spec.out_dtype) == (math_dtype, out_dtype)


@pytest.mark.parametrize(
    ("lookup", "rows"),
    [("paged", 32), ("sparse", 16)],
    ids=["tokens share their pages", "every token has its list"],
)
def test_a_sparse_call_has_the_rows_of_one_token(lookup: str, rows: int) -> None:
    """Two query tokens of sixteen heads are 32 rows, or twice 16 in a sparse call."""
    call = CallShape(heads=16, q_len=2)

    kernels = {mla_sm80(arch=SM_80, lookup=lookup, rows=tile.block_m) for tile in TILES}
    served = {spec.tile.block_m for spec in kernels if spec.serves(call)}

    assert served == {rows}
