"""The specs of the sm80 GQA kernels: tiles, counts and unsupported variants."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from mlagen.errors import UnsupportedError
from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.dtype import DType
from mlagen.spec.gqa.sm80 import gqa_sm80_specs
from mlagen.spec.gqa.variant import SUPPORTED
from mlagen.spec.kernel import CallShape
from tests.kernels import gqa_sm80

# The driver reserves 1 KiB per CTA, and an SM has 1 KiB more than the limit of a CTA.
RESERVED_BYTES = 1024
HEAD_DIMS = (*range(16, 257, 16), 512)
ROWS = (1, 16, 17, 32, 33, 64, 1000)


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_every_supported_call_has_a_tile_that_fits(arch: Arch) -> None:
    """For any number of rows and any head dim, all CTAs of an SM fit its shared memory."""
    for row, rows, head_dim in product(SUPPORTED, ROWS, HEAD_DIMS):
        for out_dtype in row.out_dtypes:
            dtypes = {"query_dtype": row.query_dtype, "kv_dtype": row.kv_dtype}
            spec = gqa_sm80(arch=arch, rows=rows, head_dim=head_dim, out_dtype=out_dtype, **dtypes)

            per_sm = (spec.shared_bytes + RESERVED_BYTES) * spec.tile.ctas_per_sm
            assert per_sm <= arch.shared_bytes + RESERVED_BYTES
            assert spec.slice_dims * spec.slices == head_dim


def test_few_rows_use_the_smallest_tile() -> None:
    """Sixteen rows are one MMA step; more rows use the tile of 32."""
    assert [gqa_sm80(rows=rows).tile.block_m for rows in ROWS] == [16, 16, 32, 32, 32, 32, 32]


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_every_kernel_of_an_arch_is_listed_once(arch: Arch) -> None:
    """Prewarming lists each kernel once, and every pair of query and KV dtypes."""
    listed = list(gqa_sm80_specs(arch))

    pairs = {(spec.variant.query_dtype, spec.variant.kv_dtype) for spec in listed}
    assert len(listed) == len(set(listed))
    assert pairs == {(row.query_dtype, row.kv_dtype) for row in SUPPORTED}


@pytest.mark.parametrize(("kv_heads", "served"), [(None, {16, 32}), (8, {16}), (1, {32})])
def test_a_call_uses_the_tile_of_its_rows(kv_heads: int | None, served: set[int]) -> None:
    """Rows are query heads per KV head times query tokens; without kv_heads, every tile matches."""
    call = CallShape(heads=64, kv_heads=kv_heads, q_len=1)

    assert {rows for rows in (16, 32) if gqa_sm80(rows=rows).serves(call)} == served


@pytest.mark.parametrize("head_dim", [0, 8, 40, 272, 320, 1024])
def test_an_unsupported_head_dim_lists_the_supported_ones(head_dim: int) -> None:
    """The message lists the supported head dims."""
    with pytest.raises(UnsupportedError) as caught:
        gqa_sm80(head_dim=head_dim)

    assert str(caught.value) == (
        f"no GQA decode kernel for head_dim {head_dim}; supported: multiples of 16 up to 256, "
        f"and 512"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_dtype": DType.FP16},
        {"out_dtype": DType.E4M3},
        {"query_dtype": DType.E4M3, "kv_dtype": DType.E4M3},
    ],
    ids=["mixed halves", "e4m3 out of bf16", "an e4m3 query"],
)
def test_unsupported_dtypes_list_the_supported_ones(changes: dict[str, Any]) -> None:
    """The message lists the support table."""
    with pytest.raises(UnsupportedError, match=r"^no GQA decode kernel for query ") as caught:
        gqa_sm80(**changes)

    for row in SUPPORTED:
        assert f"query {row.query_dtype}, cache {row.kv_dtype}, output" in str(caught.value)
