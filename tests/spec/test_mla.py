"""MLA decode: which tile serves which request, and what is refused."""

from __future__ import annotations

from itertools import product

import pytest

from mlagen.errors import UnsupportedError
from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.dtype import DType
from mlagen.spec.mla import SUPPORTED, TILES, MlaSupport, mla_decode_spec, mla_decode_specs
from tests.kernels import SM_80, SM_90A, mla_decode

# Of one block the driver keeps 1 KiB, and an SM has 1 KiB more than a block may have.
RESERVED_BYTES = 1024
ROWS = (1, 8, 16, 17, 32, 33, 64, 65, 128, 256, 1024)


def row_name(row: MlaSupport) -> str:
    """Return a readable name of a row of the support table."""
    return f"{row.query_dtype}, kv_lora_rank {row.kv_lora_rank}"


@pytest.mark.parametrize("arch", ARCHS, ids=str)
@pytest.mark.parametrize("row", SUPPORTED, ids=row_name)
def test_every_supported_request_has_a_tile_that_fits(arch: Arch, row: MlaSupport) -> None:
    """For any number of rows and any page size, all blocks of an SM fit its shared memory."""
    for rows, page_size in product(ROWS, row.page_sizes):
        spec = mla_decode_spec(
            arch=arch,
            query_dtype=row.query_dtype,
            kv_dtype=row.kv_dtype,
            kv_lora_rank=row.kv_lora_rank,
            qk_rope_head_dim=row.qk_rope_head_dim,
            page_size=page_size,
            rows=rows,
        )

        assert spec.shared_bytes <= arch.shared_bytes
        per_sm = (spec.shared_bytes + RESERVED_BYTES) * spec.blocks_per_sm
        assert per_sm <= arch.shared_bytes + RESERVED_BYTES


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_a_request_takes_the_narrowest_tile_that_holds_its_rows(arch: Arch) -> None:
    """No narrower tile of the architecture would do, and only the widest leaves rows over."""
    heights = sorted({mla_decode(arch=arch, rows=tile.tile_rows).tile_rows for tile in TILES})

    for rows in ROWS:
        chosen = mla_decode(arch=arch, rows=rows).tile_rows
        assert chosen == next((height for height in heights if height >= rows), heights[-1])


def test_tiles_are_listed_from_wide_to_narrow() -> None:
    """The choice walks the table once and relies on its order."""
    heights = [tile.tile_rows for tile in TILES]

    assert heights == sorted(heights, reverse=True)


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_every_kernel_of_an_architecture_is_listed_once(arch: Arch) -> None:
    """What a call may ask for is what prewarming builds, and no more."""
    asked = {
        mla_decode_spec(
            arch=arch,
            query_dtype=row.query_dtype,
            kv_dtype=row.kv_dtype,
            kv_lora_rank=row.kv_lora_rank,
            qk_rope_head_dim=row.qk_rope_head_dim,
            page_size=page_size,
            rows=rows,
        )
        for row in SUPPORTED
        for page_size, rows in product(row.page_sizes, ROWS)
    }

    listed = list(mla_decode_specs(arch))

    assert len(listed) == len(set(listed))
    assert set(listed) == asked


def test_the_dimensions_of_deepseek() -> None:
    """Queries are latent and rope together, values the latent part, blocks whole warps."""
    spec = mla_decode(arch=SM_90A, rows=128)

    assert (spec.head_dim_qk, spec.head_dim_vo) == (576, 512)
    assert spec.threads % 32 == 0
    assert spec.threads <= 1024


def test_an_unsupported_page_size_names_the_supported_ones() -> None:
    """The message says what was asked for and what would do, from the one table."""
    with pytest.raises(UnsupportedError) as caught:
        mla_decode(page_size=48)

    assert str(caught.value) == (
        "no MLA decode kernel for query bf16, cache bf16, kv_lora_rank 512, qk_rope_head_dim 64, "
        "page_size 48; page_size may be 1, 8, 16, 32, 64, 128"
    )


@pytest.mark.parametrize(
    ("query_dtype", "kv_dtype", "kv_lora_rank", "qk_rope_head_dim"),
    [
        (DType.BF16, DType.FP16, 512, 64),
        (DType.BF16, DType.BF16, 384, 64),
        (DType.FP16, DType.FP16, 512, 0),
    ],
    ids=["mixed dtypes", "another latent dimension", "no rope"],
)
def test_unsupported_dimensions_name_the_supported_ones(
    query_dtype: DType, kv_dtype: DType, kv_lora_rank: int, qk_rope_head_dim: int
) -> None:
    """The message lists every row of the table."""
    with pytest.raises(UnsupportedError) as caught:
        mla_decode_spec(
            arch=SM_80,
            query_dtype=query_dtype,
            kv_dtype=kv_dtype,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            page_size=64,
            rows=16,
        )

    assert str(caught.value) == (
        f"no MLA decode kernel for query {query_dtype}, cache {kv_dtype}, "
        f"kv_lora_rank {kv_lora_rank}, qk_rope_head_dim {qk_rope_head_dim}; supported: "
        "query bf16, cache bf16, kv_lora_rank 512, qk_rope_head_dim 64; "
        "query bf16, cache bf16, kv_lora_rank 256, qk_rope_head_dim 64; "
        "query fp16, cache fp16, kv_lora_rank 512, qk_rope_head_dim 64; "
        "query fp16, cache fp16, kv_lora_rank 256, qk_rope_head_dim 64"
    )
