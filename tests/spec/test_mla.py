"""MLA decode: which tile serves which request."""

from __future__ import annotations

import pytest

from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import CallShape
from mlagen.spec.mla import TILES, mla_sm80_spec, mla_sm80_specs
from mlagen.spec.mla_support import SUPPORTED, MlaSupport
from tests.kernels import SM_80, SM_90A, mla_sm80

# Of one block the driver keeps 1 KiB, and an SM has 1 KiB more than a block may have.
RESERVED_BYTES = 1024
ROWS = (1, 8, 16, 17, 32, 33, 64, 65, 128, 256, 1024)


def row_name(row: MlaSupport) -> str:
    """Return a readable name of a row of the support table."""
    return f"query {row.query_dtype}, cache {row.kv_dtype}"


@pytest.mark.parametrize("arch", ARCHS, ids=str)
@pytest.mark.parametrize("row", SUPPORTED, ids=row_name)
def test_every_supported_request_has_a_tile_that_fits(arch: Arch, row: MlaSupport) -> None:
    """For any number of rows and every variant, all blocks of an SM fit its shared memory."""
    for variant in row.variants():
        for rows in ROWS:
            spec = mla_sm80_spec(arch, variant, rows)

            assert spec.shared_bytes <= arch.shared_bytes
            per_sm = (spec.shared_bytes + RESERVED_BYTES) * spec.tile.ctas_per_sm
            assert per_sm <= arch.shared_bytes + RESERVED_BYTES


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_a_request_takes_the_narrowest_tile_that_holds_its_rows(arch: Arch) -> None:
    """No narrower tile of the architecture would do, and only the widest leaves rows over."""
    heights = sorted({mla_sm80(arch=arch, rows=tile.block_m).tile.block_m for tile in TILES})

    for rows in ROWS:
        chosen = mla_sm80(arch=arch, rows=rows).tile.block_m
        assert chosen == next((height for height in heights if height >= rows), heights[-1])


def test_tiles_are_listed_from_wide_to_narrow() -> None:
    """The choice walks the table once and relies on its order."""
    heights = [tile.block_m for tile in TILES]

    assert heights == sorted(heights, reverse=True)


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_every_kernel_of_an_architecture_is_listed_once(arch: Arch) -> None:
    """What a call of a usual page size may ask for is what prewarming builds, and no more."""
    asked = {
        mla_sm80_spec(arch, variant, rows)
        for row in SUPPORTED
        for variant in row.variants()
        for rows in ROWS
    }

    listed = list(mla_sm80_specs(arch))

    assert len(listed) == len(set(listed))
    assert set(listed) == asked


def test_the_dimensions_of_deepseek() -> None:
    """Queries are latent and rope together, values the latent part, blocks whole warps."""
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
def test_what_is_multiplied_and_what_is_written(
    query_dtype: DType, kv_dtype: DType, math_dtype: DType, out_dtype: DType
) -> None:
    """A 16-bit query is multiplied as it is, e4m3 in fp16; bf16 is written for a narrow query."""
    spec = mla_sm80(query_dtype=query_dtype, kv_dtype=kv_dtype)

    assert (spec.math_dtype, spec.out_dtype) == (math_dtype, out_dtype)


@pytest.mark.parametrize(
    ("lookup", "rows"),
    [("paged", 32), ("sparse", 16)],
    ids=["tokens share their pages", "every token has its list"],
)
def test_a_sparse_call_has_the_rows_of_one_token(lookup: str, rows: int) -> None:
    """Two query tokens of sixteen heads are 32 rows, or twice 16."""
    call = CallShape(heads=16, q_len=2)

    kernels = {mla_sm80(arch=SM_80, lookup=lookup, rows=tile.block_m) for tile in TILES}
    served = {spec.tile.block_m for spec in kernels if spec.serves(call)}

    assert served == {rows}
