"""The sm90 MLA launch plan: examples worked out by hand, and properties for any shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.families.common.problem import ProblemShape
from mlagen.families.mla.plan import MlaSm90Plan, choose_block_m, fits_in_int32, plan_mla_sm90
from mlagen.spec.dtype import DType
from mlagen.spec.mla.sm90 import MlaSm90Spec
from tests.families.shapes import SMS, mla_shape
from tests.kernels import SM_COUNTS, mla_sm90, mla_sm90_fp8, mla_sm90_fp8kv, mla_sm90_two_pools

FP8KV_E4M3 = mla_sm90_fp8kv(rows=16, query_dtype=DType.E4M3, kv_dtype=DType.E4M3)


def plan(shape: ProblemShape, sm_count: int = SMS) -> MlaSm90Plan:
    """Return the plan of a bf16 problem."""
    return plan_mla_sm90(mla_sm90(rows=shape.rows), shape, sm_count)


@pytest.mark.parametrize(
    ("shape", "sm_count", "expected"),  # CTAs of a group, and groups
    [
        # One M tile: a group is one CTA; 2 sequences of 16 KV blocks, plus 2 of overhead: 18
        # ranges. Without swap-AB the overhead is 6: 44, so 22.
        (mla_shape(2, 16, 1024), SMS, (1, 18)),
        (mla_shape(2, 20, 1024), SMS, (1, 18)),
        (mla_shape(2, 64, 1024), SMS, (1, 22)),
        # Two tiles: 2 waves by one CTA, 1 wave by 66 groups of two, 44 of three or 33 of four.
        (mla_shape(80, 128, 4096), SMS, (2, 66)),
        # Three tiles: 3 / 132 and 1 / 44 are equal; the larger group wins.
        (mla_shape(80, 192, 4096), SMS, (3, 44)),
        # Four tiles: 4 / 132, 2 / 66 and 1 / 33 are equal.
        (mla_shape(80, 128, 4096, q_len=2), SMS, (4, 33)),
        # Five tiles: 5 / 132 is less than 3 / 66, 2 / 44 and 2 / 33.
        (mla_shape(80, 64, 4096, q_len=5), SMS, (1, 132)),
        # Of 131 SMs groups of three leave two idle, which is less than one in 25: 6 / 131 is equal
        # for one, two and three. The same for four of 78 and of 114, but not for four of 46.
        (mla_shape(80, 128, 4096, q_len=3), 131, (3, 43)),
        (mla_shape(80, 128, 4096, q_len=2), 78, (4, 19)),
        (mla_shape(80, 128, 4096, q_len=2), 114, (4, 28)),
        (mla_shape(80, 128, 4096, q_len=2), 46, (2, 23)),
        # A work tile without tokens is 2 of overhead: 1 range.
        (mla_shape(1, 16, 0), SMS, (1, 1)),
        # Two groups of two tiles, of 2 blocks and 6 of overhead: 8 ranges.
        (mla_shape(2, 128, 65), SMS, (2, 8)),
        # 10 query tokens of 128 heads are 10 groups of 128 rows, and 4 sequences may begin 4 more:
        # with 1 block and 6 of overhead each 98, which is 49 ranges.
        (mla_shape(4, 128, 64, tokens=10), SMS, (2, 49)),
        (mla_shape(9, 256, 4096), 2, (2, 1)),
    ],
)
def test_cta_groups_and_grid_match_the_examples(
    shape: ProblemShape, sm_count: int, expected: tuple[int, int]
) -> None:
    """The group size minimizes waves; the grid has as many groups as ranges are worthwhile."""
    planned = plan(shape, sm_count)

    assert (planned.cta_group_size, planned.num_cta_groups) == expected


# KV blocks of all tiles per SM, of 132 SMs: two for bf16 with tiles of 16 rows; for an FP8 KV cache
# three, and six with tiles of 32. With two pools the smaller tiles must not outnumber the SMs, too.
@pytest.mark.parametrize(
    ("spec", "shape", "block_m"),
    [
        (mla_sm90(rows=128), mla_shape(1, 128, 64 * 33), 16),
        (mla_sm90(rows=128), mla_shape(1, 128, 64 * 33 + 1), 64),
        (mla_sm90(rows=128), mla_shape(33, 128, 64), 16),
        (mla_sm90(rows=128), mla_shape(34, 128, 64), 64),
        (mla_sm90(rows=17), mla_shape(1, 17, 64), 16),
        (mla_sm90(rows=16), mla_shape(1, 16, 1), 16),
        (mla_sm90_fp8(rows=128), mla_shape(1, 128, 64 * 49), 16),
        (mla_sm90_fp8(rows=128), mla_shape(1, 128, 64 * 50), 32),
        (mla_sm90_fp8(rows=128), mla_shape(1, 128, 64 * 198), 32),
        (mla_sm90_fp8(rows=128), mla_shape(1, 128, 64 * 199), 64),
        (mla_sm90_fp8kv(rows=128), mla_shape(1, 128, 2048), 16),
        (mla_sm90_fp8kv(rows=128), mla_shape(4, 128, 2048), 32),
        (mla_sm90_fp8kv(rows=128), mla_shape(8, 128, 2048), 64),
        (mla_sm90_two_pools(rows=64), mla_shape(9, 64, 640), 16),
        (mla_sm90_two_pools(rows=64), mla_shape(10, 64, 640), 32),
        (mla_sm90_two_pools(rows=64), mla_shape(33, 64, 128), 16),
        (mla_sm90_two_pools(rows=64), mla_shape(34, 64, 128), 32),
        (mla_sm90_two_pools(rows=64), mla_shape(66, 64, 128), 32),
        (mla_sm90_two_pools(rows=64), mla_shape(67, 64, 128), 64),
        (mla_sm90_fp8kv(rows=64), mla_shape(34, 64, 128), 16),
        (mla_sm90_fp8kv(rows=64), mla_shape(67, 64, 128), 32),
    ],
)
def test_little_work_uses_smaller_tiles(
    spec: MlaSm90Spec, shape: ProblemShape, block_m: int
) -> None:
    """Smaller tiles give work to more SMs."""
    assert choose_block_m(spec, shape, SMS) == block_m


@pytest.mark.parametrize(
    ("spec", "rows", "sm_count", "batch", "kv_blocks"),
    [
        # The limit of bf16 is 256 KV blocks for 16 rows, 64 for up to 32, and zero for more.
        *((mla_sm90(rows=16), 16, SMS, batch, 256 // batch) for batch in (1, 2, 16)),
        *((mla_sm90(rows=32), 32, SMS, 4, 16), (mla_sm90(rows=33), 33, SMS, 1, 0)),
        # With an FP8 query the sm80 kernel is rarely faster.
        *((mla_sm90_fp8(rows=16), 16, SMS, 1, 64), (mla_sm90_fp8(rows=17), 17, SMS, 1, 0)),
        *((mla_sm90_fp8kv(rows=rows), rows, SMS, 1, 2048 // rows) for rows in (16, 128)),
        (FP8KV_E4M3, 16, SMS, 1, 64),
        # Lists into two pools are short.
        (mla_sm90_two_pools(), 129, SMS, 1, 0),
        *((mla_sm90_two_pools(rows=rows), rows, SMS, 1, 960 // rows) for rows in (16, 64, 128)),
        # It grows with the SMs.
        *((mla_sm90(rows=16), 16, sms, 1, 256 * sms // 132) for sms in (16, 78, 114, 144)),
    ],
)
def test_few_rows_and_tokens_are_small(
    spec: MlaSm90Spec, rows: int, sm_count: int, batch: int, kv_blocks: int
) -> None:
    """Up to a limit by dtype, rows and SMs, the sm80 kernel is faster."""
    for tokens in (64 * kv_blocks, 64 * kv_blocks + 1):
        planned = plan_mla_sm90(spec, mla_shape(batch, rows, tokens), sm_count)
        assert planned.is_small is (0 < tokens <= 64 * kv_blocks)


@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "small"),
    [
        *((16, 16, 128, True), (17, 16, 128, False), (17, 16, 129, True)),
        *((1, 64, 128, False), (1, 64, 129, True)),
    ],
)
def test_a_window_alone_is_small_in_few_tiles(
    batch: int, heads: int, tokens: int, small: bool
) -> None:
    """A list of one or two KV blocks over two pools."""
    spec = mla_sm90_two_pools(rows=heads)
    assert plan_mla_sm90(spec, mla_shape(batch, heads, tokens), SMS).is_small is small


@pytest.mark.parametrize(
    ("batch", "max_tokens", "fits"),
    # A work tile of 64 rows has an overhead of 6 KV blocks.
    [(1, (2**31 - 7) * 64, True), (1, (2**31 - 6) * 64, False), (2**20, 2**17, False)],
)
def test_linear_block_indices_fit_in_32_bits(batch: int, max_tokens: int, fits: bool) -> None:
    """Work tiles times their length are at most 2^31 - 1."""
    planned = plan(mla_shape(batch, 64, 1))

    assert fits_in_int32(mla_sm90(rows=64), planned, max_tokens) is fits


def test_without_query_tokens_nothing_is_launched() -> None:
    """The grid and the workspace are empty."""
    for empty in (plan(mla_shape(0, 16, 100)), plan(mla_shape(3, 16, 100, tokens=0))):
        assert (empty.num_ctas, empty.workspace_bytes) == (0, 0)


@settings(deadline=None, max_examples=200)
@given(
    shape=st.builds(
        mla_shape,
        batch=st.integers(1, 600),
        heads=st.integers(1, 256),
        max_kv_len=st.integers(0, 200_000),
        q_len=st.integers(1, 8),
    ),
    is_ragged=st.booleans(),
    sm_count=st.one_of(st.integers(1, 160), st.sampled_from(SM_COUNTS)),
)
def test_the_grid_is_co_resident_and_whole_cta_groups(
    shape: ProblemShape, is_ragged: bool, sm_count: int
) -> None:
    """CTAs wait for each other, so there are at most as many as SMs, which bounds the workspace."""
    if is_ragged:
        shape = replace(shape, q_len=0)

    planned = plan(shape, sm_count)

    assert 1 <= planned.cta_group_size <= 4
    assert planned.num_ctas == planned.num_cta_groups * planned.cta_group_size
    assert 1 <= planned.num_ctas <= sm_count
    # Two splits per CTA: partial outputs in fp16, and 16 bytes of state per row.
    rows = 2 * planned.num_ctas * mla_sm90(rows=shape.rows).block_m
    assert planned.partial_rows_offset == rows * 512 * 2
    assert planned.workspace_bytes == rows * (512 * 2 + 16)
