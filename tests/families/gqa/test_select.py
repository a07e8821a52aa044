"""Kernel choice and launch plan of grouped-query decode; needs no GPU."""

from __future__ import annotations

import pytest

from mlagen.families.common.plan_sm80 import GqaProblemShape, Sm80Plan
from mlagen.families.gqa import select as gqa_plan
from mlagen.spec.dtype import DType
from mlagen.spec.gqa.sm80 import GqaSm80Spec
from mlagen.spec.gqa.variant import GqaVariant

VARIANT = GqaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16, out_dtype=DType.BF16)


pytestmark = pytest.mark.usefixtures("h200")


def plan(
    *,
    q_len: int = 1,
    group: int = 4,
    window: int = 0,
    max_kv_len: int = 1000,
    tokens: int | None = None,
) -> tuple[GqaSm80Spec, Sm80Plan]:
    """Return kernel and plan of a call with four requests and two KV heads."""
    shape = GqaProblemShape(
        batch=4,
        q_len=q_len if tokens is None else 0,
        max_q_len=q_len,
        heads=2 * group,
        kv_heads=2,
        total_rows=(4 * q_len if tokens is None else tokens) * 2 * group,
        max_kv_len=gqa_plan.attended_tokens(max_kv_len, window, q_len),
    )
    return gqa_plan.plan_gqa_sm80_call(0, VARIANT, shape)


def test_the_tile_is_one_for_the_rows_of_a_kv_head() -> None:
    """The rows of a tile are all query tokens and query heads of a KV head."""
    narrow, _ = plan(group=4, q_len=4)
    wide, _ = plan(group=4, q_len=5)

    assert (narrow.tile.block_m, wide.tile.block_m) == (16, 32)


def test_a_window_bounds_the_splits() -> None:
    """A window of 64 tokens has the splits of a request of 64 tokens."""
    assert plan(window=64, max_kv_len=100_000)[1] == plan(max_kv_len=65)[1]
    assert plan(window=64, max_kv_len=10)[1] == plan(max_kv_len=10)[1]
    assert plan(max_kv_len=100_000)[1].splits > plan(max_kv_len=65)[1].splits


def test_ragged_queries_take_tiles_by_their_tokens() -> None:
    """The number of row tiles follows from all query tokens, not from the maximum length."""
    few = plan(q_len=64, tokens=4)[1]
    many = plan(q_len=64, tokens=256)[1]

    assert few.row_tiles < many.row_tiles
    assert plan(q_len=64)[1].row_tiles < many.row_tiles
