"""Tests of the sm90 MLA launch plan against numbers example out by hand."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.families.common.plan_sm80 import MlaProblemShape
from mlagen.families.mla.plan_sm90 import MlaSm90Plan, choose_block_m, fits_in_int32, plan_mla_sm90
from mlagen.spec.dtype import DType
from mlagen.spec.mla.sm90 import MlaSm90Spec
from tests.kernels import mla_sm90, mla_sm90_fp8, mla_sm90_fp8kv

SMS = 132


def plan(
    *,
    batch: int,
    heads: int,
    max_kv_len: int,
    q_len: int = 1,
    tokens: int | None = None,
    sm_count: int = SMS,
) -> MlaSm90Plan:
    """Return the plan of a bf16 problem; ``tokens`` are the query tokens of ragged sequences."""
    problem = MlaProblemShape(
        batch=batch,
        q_len=q_len if tokens is None else 0,
        heads=heads,
        total_rows=(batch * q_len if tokens is None else tokens) * heads,
        max_kv_len=max_kv_len,
    )
    return plan_mla_sm90(mla_sm90(rows=heads * q_len), problem, q_len, sm_count)


class WorkedExample(NamedTuple):
    """A problem and its plan."""

    problem: dict[str, int]
    cta_group_size: int
    num_cta_groups: int
    block_m: int


EXAMPLES = {
    # One row tile: a group is one CTA; 2 sequences of 16 KV blocks, plus 2 of overhead: 18 ranges.
    # Without swap-AB the overhead is 6: 44, so 22.
    "a tile of 16": WorkedExample({"batch": 2, "heads": 16, "max_kv_len": 1024}, 1, 18, 16),
    "a tile of 32": WorkedExample({"batch": 2, "heads": 20, "max_kv_len": 1024}, 1, 18, 32),
    "a tile of 64": WorkedExample({"batch": 2, "heads": 64, "max_kv_len": 1024}, 1, 22, 64),
    # Two tiles: 2 waves by one CTA, 1 wave by 66 groups of two, 44 of three or 33 of four.
    "two tiles": WorkedExample({"batch": 80, "heads": 128, "max_kv_len": 4096}, 2, 66, 64),
    # Three tiles: 3 / 132 and 1 / 44 are equal; the larger group wins.
    "three tiles": WorkedExample({"batch": 80, "heads": 192, "max_kv_len": 4096}, 3, 44, 64),
    # Four tiles: 4 / 132, 2 / 66 and 1 / 33 are equal.
    "four tiles": WorkedExample(
        {"batch": 80, "heads": 128, "q_len": 2, "max_kv_len": 4096}, 4, 33, 64
    ),
    # Five tiles: 5 / 132 is less than 3 / 66, 2 / 44 and 2 / 33.
    "five tiles": WorkedExample(
        {"batch": 80, "heads": 64, "q_len": 5, "max_kv_len": 4096}, 1, 132, 64
    ),
    # Of 131 SMs groups of two leave one idle, groups of three two: 6 / 131 is the minimum.
    "an odd device": WorkedExample(
        {"batch": 80, "heads": 128, "q_len": 3, "max_kv_len": 4096, "sm_count": 131}, 1, 131, 64
    ),
    # A work tile without tokens is 2 of overhead: 1 range.
    "no tokens": WorkedExample({"batch": 1, "heads": 16, "max_kv_len": 0}, 1, 1, 16),
    # Two groups of two tiles, of 2 blocks and 6 of overhead: 8 ranges.
    "few tokens": WorkedExample({"batch": 2, "heads": 128, "max_kv_len": 65}, 2, 8, 64),
    # 10 query tokens of 128 heads are 10 groups of 128 rows, and 4 sequences may begin 4 more: with
    # 1 block and 6 of overhead each 98, which is 49 ranges.
    "ragged": WorkedExample({"batch": 4, "heads": 128, "max_kv_len": 64, "tokens": 10}, 2, 49, 64),
    "two SMs": WorkedExample(
        {"batch": 9, "heads": 256, "max_kv_len": 4096, "sm_count": 2}, 2, 1, 64
    ),
}


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_cta_groups_and_grid_match_the_examples(example: WorkedExample) -> None:
    """The group size minimises waves; the grid has as many groups as ranges are worthwhile."""
    planned = plan(**example.problem)

    blocks = example.num_cta_groups * example.cta_group_size
    values = 2 * blocks * example.block_m * 512 * 2
    assert planned == MlaSm90Plan(
        cta_group_size=example.cta_group_size,
        num_cta_groups=example.num_cta_groups,
        num_ctas=blocks,
        total_tiles=planned.total_tiles,
        partial_rows_offset=values,
        workspace_bytes=values + 2 * blocks * example.block_m * 16,
        is_small=planned.is_small,
    )


# KV blocks of all tiles per SM, of 132 SMs: two for bf16 with tiles of 16 rows; for an FP8 KV cache
# three, and six with tiles of 32.
@pytest.mark.parametrize(
    ("spec", "batch", "heads", "max_kv_len", "block_m"),
    [
        (mla_sm90(rows=128), 1, 128, 64 * 33, 16),
        (mla_sm90(rows=128), 1, 128, 64 * 33 + 1, 64),
        (mla_sm90(rows=128), 33, 128, 64, 16),
        (mla_sm90(rows=128), 34, 128, 64, 64),
        (mla_sm90(rows=17), 1, 17, 64, 16),
        (mla_sm90(rows=16), 1, 16, 1, 16),
        (mla_sm90_fp8(rows=128), 1, 128, 64 * 49, 16),
        (mla_sm90_fp8(rows=128), 1, 128, 64 * 50, 32),
        (mla_sm90_fp8(rows=128), 1, 128, 64 * 198, 32),
        (mla_sm90_fp8(rows=128), 1, 128, 64 * 199, 64),
        (mla_sm90_fp8kv(rows=128), 1, 128, 2048, 16),
        (mla_sm90_fp8kv(rows=128), 4, 128, 2048, 32),
        (mla_sm90_fp8kv(rows=128), 8, 128, 2048, 64),
    ],
    ids=str,
)
def test_little_work_uses_smaller_tiles(
    spec: MlaSm90Spec, batch: int, heads: int, max_kv_len: int, block_m: int
) -> None:
    """Smaller tiles give work to more SMs."""
    problem = MlaProblemShape(
        batch=batch, q_len=1, heads=heads, total_rows=batch * heads, max_kv_len=max_kv_len
    )

    assert choose_block_m(spec, problem, 1, SMS) == block_m


@pytest.mark.parametrize(
    ("batch", "heads", "max_kv_len", "is_small"),
    [
        (2, 16, 1024, True),
        (16, 16, 1024, True),
        (16, 16, 1025, False),
        (4, 32, 1024, True),
        (4, 32, 1025, False),
        (1, 33, 64, False),
    ],
)
def test_few_rows_and_tokens_are_small(
    batch: int, heads: int, max_kv_len: int, is_small: bool
) -> None:
    """The limit is 256 KV blocks for 16 rows, 64 for up to 32, and zero for more."""
    assert plan(batch=batch, heads=heads, max_kv_len=max_kv_len).is_small is is_small


@pytest.mark.parametrize(
    ("spec", "heads", "blocks", "is_small"),
    [
        (mla_sm90_fp8(rows=16), 16, 64, True),
        (mla_sm90_fp8(rows=16), 16, 65, False),
        (mla_sm90_fp8(rows=17), 17, 1, False),
        (mla_sm90_fp8kv(rows=16), 16, 128, True),
        (mla_sm90_fp8kv(rows=16), 16, 129, False),
        (mla_sm90_fp8kv(rows=128), 128, 16, True),
        (mla_sm90_fp8kv(rows=128), 128, 17, False),
        (mla_sm90_fp8kv(rows=16, query_dtype=DType.E4M3, kv_dtype=DType.E4M3), 16, 65, False),
    ],
)
def test_the_small_call_limit_depends_on_the_rows(
    spec: MlaSm90Spec, heads: int, blocks: int, is_small: bool
) -> None:
    """With an FP8 query the sm80 kernel is rarely faster."""
    problem = MlaProblemShape(
        batch=1, q_len=1, heads=heads, total_rows=heads, max_kv_len=64 * blocks
    )

    assert plan_mla_sm90(spec, problem, 1, SMS).is_small is is_small


@pytest.mark.parametrize(
    ("batch", "max_tokens", "fits"),
    # A work tile of 64 rows has an overhead of 6 KV blocks.
    [(1, (2**31 - 7) * 64, True), (1, (2**31 - 6) * 64, False), (2**20, 2**17, False)],
)
def test_linear_block_indices_fit_in_32_bits(batch: int, max_tokens: int, fits: bool) -> None:
    """Work tiles times their length are at most 2^31 - 1."""
    planned = plan(batch=batch, heads=64, max_kv_len=1)

    assert planned.total_tiles == batch
    assert fits_in_int32(mla_sm90(rows=64), planned, max_tokens) is fits


def test_without_query_tokens_nothing_is_launched() -> None:
    """The grid and the workspace are empty."""
    for empty in (
        plan(batch=0, heads=16, max_kv_len=100),
        plan(batch=3, heads=16, max_kv_len=100, tokens=0),
    ):
        assert (empty.num_ctas, empty.workspace_bytes) == (0, 0)


@settings(deadline=None, max_examples=200)
@given(
    batch=st.integers(1, 600),
    heads=st.integers(1, 256),
    q_len=st.integers(1, 8),
    max_kv_len=st.integers(0, 200_000),
    is_ragged=st.booleans(),
    sm_count=st.integers(1, 160),
)
def test_the_grid_is_co_resident_and_whole_cta_groups(
    batch: int, heads: int, q_len: int, max_kv_len: int, is_ragged: bool, sm_count: int
) -> None:
    """CTAs wait for each other, so there are at most as many as SMs, which bounds the workspace."""
    planned = plan(
        batch=batch,
        heads=heads,
        q_len=q_len,
        max_kv_len=max_kv_len,
        tokens=batch * q_len if is_ragged else None,
        sm_count=sm_count,
    )

    assert 1 <= planned.cta_group_size <= 4
    assert planned.num_ctas == planned.num_cta_groups * planned.cta_group_size
    assert 1 <= planned.num_ctas <= sm_count
    assert planned.partial_rows_offset % 16 == 0
    assert planned.workspace_bytes <= sm_count * 257 * 1024
