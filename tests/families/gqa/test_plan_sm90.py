"""Tests of the sm90 GQA launch plan against numbers example out by hand."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.families.common.plan_sm80 import GqaProblemShape
from mlagen.families.gqa.plan_sm90 import (
    GqaSm90Plan,
    choose_heads_per_cta,
    fits_in_int32,
    plan_gqa_sm90,
)
from mlagen.spec.dtype import DType
from tests.kernels import gqa_sm90

SMS = 132


def plan(
    *,
    batch: int,
    max_kv_len: int,
    kv_heads: int = 8,
    group: int = 8,
    q_len: int = 1,
    tokens: int | None = None,
    sm_count: int = SMS,
) -> GqaSm90Plan:
    """Return the plan of a bf16 problem; ``tokens`` are the query tokens of ragged sequences."""
    problem = GqaProblemShape(
        batch=batch,
        q_len=q_len if tokens is None else 0,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        total_rows=(batch * q_len if tokens is None else tokens) * kv_heads * group,
        max_kv_len=max_kv_len,
    )
    return plan_gqa_sm90(gqa_sm90(rows=group * q_len), problem, sm_count)


class WorkedExample(NamedTuple):
    """A problem and its plan."""

    problem: dict[str, int]
    cta_group_size: int
    num_cta_groups: int
    num_tiles: int


EXAMPLES = {
    # Four KV heads of 256 bytes are 1024 bytes together.
    "8 kv heads": WorkedExample({"batch": 128, "max_kv_len": 4096}, 4, 33, 2),
    # Whole sequences of 32 tiles: four more SMs would save 2 us and cost more.
    "one kv head": WorkedExample({"batch": 128, "max_kv_len": 4096, "kv_heads": 1}, 1, 128, 1),
    "3 kv heads": WorkedExample({"batch": 128, "max_kv_len": 4096, "kv_heads": 3}, 3, 44, 1),
    "48 kv heads": WorkedExample({"batch": 128, "max_kv_len": 4096, "kv_heads": 48}, 4, 33, 12),
    # 64 rows are two tiles: two CTAs read the same tokens.
    "two tiles": WorkedExample({"batch": 9, "max_kv_len": 4096, "group": 16, "q_len": 4}, 4, 33, 4),
    # Two work tiles of 16 KV tiles: 6.6 us to read by two groups, 2.5 by eight, 1.7 to combine.
    "a short sequence": WorkedExample({"batch": 1, "max_kv_len": 2048}, 4, 8, 2),
    # Eight work tiles of eight KV tiles: 32 SMs read as fast as 132.
    "whole work tiles": WorkedExample({"batch": 4, "max_kv_len": 1024}, 4, 8, 2),
    "nothing": WorkedExample({"batch": 0, "max_kv_len": 512}, 4, 0, 2),
}


def e4m3_problem(*, batch: int, kv_heads: int = 8, max_kv_len: int = 4096) -> GqaProblemShape:
    """Return a problem whose CTAs may process two KV heads."""
    return GqaProblemShape(
        batch=batch,
        q_len=1,
        heads=kv_heads * 8,
        kv_heads=kv_heads,
        total_rows=batch * kv_heads * 8,
        max_kv_len=max_kv_len,
    )


@pytest.mark.parametrize(
    ("batch", "kv_heads", "heads"),
    [
        (32, 8, 2),  # work tiles of four pairs of heads: 32 for 33 CTA groups
        (31, 8, 1),
        (64, 4, 2),  # work tiles of two pairs: 64 for 66 CTA groups
        (63, 4, 1),
        (500, 3, 1),  # odd number of heads
        (0, 8, 1),
    ],
)
def test_ctas_process_two_heads_if_nearly_every_sm_has_a_whole_work_tile(
    batch: int, kv_heads: int, heads: int
) -> None:
    """Otherwise work tiles would need more splits, or SMs would be idle."""
    spec = gqa_sm90(kv_dtype=DType.E4M3)

    assert choose_heads_per_cta(spec, e4m3_problem(batch=batch, kv_heads=kv_heads), SMS) == heads
    assert choose_heads_per_cta(gqa_sm90(), e4m3_problem(batch=batch, kv_heads=kv_heads), SMS) == 1


def test_a_cta_of_two_heads_stores_splits_of_both() -> None:
    """The sequence has half as many CTAs, and the workspace holds the partials of both heads."""
    spec = gqa_sm90(kv_dtype=DType.E4M3, heads_per_cta=2)

    found = plan_gqa_sm90(spec, e4m3_problem(batch=40), SMS)

    assert (found.cta_group_size, found.num_tiles, found.num_ctas) == (4, 1, 132)
    assert found.partial_rows_offset == 2 * 132 * 2 * 8 * 128 * 4
    assert found.workspace_bytes == found.partial_rows_offset + 2 * 132 * 2 * 8 * 8


def test_a_converted_cache_uses_more_sms() -> None:
    """A sequence of 64 tiles: 12.6 us by 32 SMs, 7.6 us by 128, and 1.2 us more to combine."""
    found = plan_gqa_sm90(
        gqa_sm90(kv_dtype=DType.E4M3), e4m3_problem(batch=1, max_kv_len=16384), SMS
    )

    assert found.num_cta_groups == 16


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_cta_groups_match_the_examples(example: WorkedExample) -> None:
    """The group has the size with the best bandwidth, and the grid the lowest modeled time."""
    found = plan(**example.problem)

    assert (found.cta_group_size, found.num_cta_groups, found.num_tiles) == example[1:]
    assert found.num_ctas == found.cta_group_size * found.num_cta_groups


def test_the_workspace_holds_two_splits_per_cta() -> None:
    """Partial outputs in fp32 come first, then two numbers per row."""
    found = plan(batch=128, max_kv_len=4096)

    assert found.partial_rows_offset == 2 * 132 * 8 * 128 * 4
    assert found.workspace_bytes == found.partial_rows_offset + 2 * 132 * 8 * 8


def test_ragged_sequences_are_counted_by_their_tokens() -> None:
    """Each may begin one tile more than its rows fill; all SMs are used, since lengths differ."""
    found = plan(batch=3, max_kv_len=4096, q_len=4, tokens=7)

    assert found.row_tiles == 0
    assert found.total_tiles == found.num_tiles * (3 + 7 * 8 // 32)
    assert found.num_ctas == 132


@settings(deadline=None)
@given(
    kv_heads=st.integers(1, 200),
    group=st.integers(1, 40),
    q_len=st.integers(1, 5),
    sm_count=st.integers(1, 160),
)
def test_cta_groups_cover_all_work_of_a_sequence(
    kv_heads: int, group: int, q_len: int, sm_count: int
) -> None:
    """No rank of a group is idle, and the groups fit the GPU."""
    found = plan(
        batch=500, max_kv_len=9000, kv_heads=kv_heads, group=group, q_len=q_len, sm_count=sm_count
    )

    assert found.num_tiles * found.cta_group_size == kv_heads * found.row_tiles
    assert 1 <= found.num_ctas <= sm_count


def test_a_schedule_beyond_32_bits_is_detected() -> None:
    """Work tiles times their length are at most 2^31 - 1."""
    found = plan(batch=1 << 10, max_kv_len=4096, sm_count=128)  # 2^11 work tiles

    assert fits_in_int32(gqa_sm90(), found, ((1 << 20) - 1) * 128)
    assert not fits_in_int32(gqa_sm90(), found, (1 << 20) * 128)
