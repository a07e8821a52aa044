"""The sm90 GQA launch plan: examples worked out by hand, and properties for any shape."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.families.common.problem import ProblemShape
from mlagen.families.gqa.plan import (
    GqaSm90Plan,
    choose_kv_heads_per_cta,
    fits_in_int32,
    plan_gqa_sm90,
)
from mlagen.spec.dtype import DType
from mlagen.spec.gqa.sm90 import GqaSm90Spec
from tests.families.shapes import SMS, gqa_shape
from tests.kernels import SM_COUNTS, gqa_sm90


def plan(shape: ProblemShape, sm_count: int = SMS, spec: GqaSm90Spec | None = None) -> GqaSm90Plan:
    """Return the plan of a problem, by default of bf16."""
    return plan_gqa_sm90(spec or gqa_sm90(rows=shape.rows), shape, sm_count)


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),  # CTAs of a group, groups, tiles of a sequence
    [
        # Four KV heads of 256 bytes are 1024 bytes together.
        (gqa_shape(128), None, (4, 33, 2)),
        # Whole sequences of 32 tiles: four more SMs would save 2 us and cost more.
        (gqa_shape(128, kv_heads=1), None, (1, 128, 1)),
        (gqa_shape(128, kv_heads=3), None, (3, 44, 1)),
        (gqa_shape(128, kv_heads=48), None, (4, 33, 12)),
        # 64 rows are two tiles: two CTAs read the same tokens.
        (gqa_shape(9, group=16, q_len=4), None, (4, 33, 4)),
        # Two work tiles of 16 KV tiles: 6.6 us to read by two groups, 2.5 by eight, 1.7 to combine.
        (gqa_shape(1, 2048), None, (4, 8, 2)),
        # Eight work tiles of eight KV tiles: 32 SMs read as fast as 132.
        (gqa_shape(4, 1024), None, (4, 8, 2)),
        (gqa_shape(0, 512), None, (4, 0, 2)),
        # A sequence of 64 tiles: 12.6 us by 32 SMs, 7.6 us by 128, and 1.2 us more to combine.
        (gqa_shape(1, 16384), gqa_sm90(kv_dtype=DType.E4M3), (8, 16, 1)),
    ],
)
def test_cta_groups_match_the_examples(
    shape: ProblemShape, spec: GqaSm90Spec | None, expected: tuple[int, int, int]
) -> None:
    """The group has the size with the best bandwidth, and the grid the lowest modeled time."""
    found = plan(shape, spec=spec)

    assert (found.cta_group_size, found.num_cta_groups, found.num_tiles) == expected


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
    shape = gqa_shape(batch, kv_heads=kv_heads)

    assert choose_kv_heads_per_cta(gqa_sm90(kv_dtype=DType.E4M3), shape, SMS) == heads
    assert choose_kv_heads_per_cta(gqa_sm90(), shape, SMS) == 1
    for kv_dtype, known in (
        (DType.E4M3, 1),
        (DType.NVFP4, 1 if kv_heads == 3 else 4),
    ):  # for any batch
        spec = gqa_sm90(kv_dtype=kv_dtype, batch_invariant=True)
        assert choose_kv_heads_per_cta(spec, shape, SMS) == known


@pytest.mark.parametrize(
    ("spec", "batch", "num_tiles"),
    [(gqa_sm90(), 128, 2), (gqa_sm90(kv_dtype=DType.E4M3, kv_heads_per_cta=2), 40, 1)],
    ids=["one head", "two heads"],
)
def test_the_workspace_holds_two_splits_per_cta_and_head(
    spec: GqaSm90Spec, batch: int, num_tiles: int
) -> None:
    """Partial outputs in fp32 come first, then two numbers per row."""
    found = plan(gqa_shape(batch), spec=spec)

    splits = 2 * 132 * spec.kv_heads_per_cta
    assert (found.cta_group_size, found.num_tiles, found.num_ctas) == (4, num_tiles, 132)
    assert found.partial_rows_offset == splits * 8 * 128 * 4
    assert found.workspace_bytes == found.partial_rows_offset + splits * 8 * 8


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (128, True),  # 256 work tiles for 33 CTA groups: seven or eight
        (64, True),
        (52, False),  # 104: most groups would be idle while a few take a fourth
        (16, False),  # one tile, or none
        (0, False),
    ],
)
def test_ranges_take_whole_tiles_if_few_cta_groups_end_early(batch: int, expected: bool) -> None:
    """Groups that end early are few, so the others keep the memory busy."""
    assert plan(gqa_shape(batch)).takes_whole_tiles == expected
    assert not plan(gqa_shape(batch, q_len=4, tokens=4 * batch)).takes_whole_tiles  # ragged


def test_ragged_sequences_are_counted_by_their_tokens() -> None:
    """Each may begin one tile more than its rows fill; all SMs are used, since lengths differ."""
    found = plan(gqa_shape(3, q_len=4, tokens=7))

    assert found.m_tiles == 0
    assert found.total_tiles == found.num_tiles * (3 + 7 * 8 // 32)
    assert found.num_ctas == 132


@settings(deadline=None)
@given(
    st.integers(1, 200),
    st.integers(1, 40),
    st.integers(1, 5),
    st.one_of(st.integers(1, 160), st.sampled_from(SM_COUNTS)),
    st.data(),
)
def test_cta_groups_cover_all_work_of_a_sequence(
    kv_heads: int, group: int, q_len: int, sm_count: int, data: st.DataObject
) -> None:
    """No rank of a group is idle, and the groups fit the GPU up to one SM in 25."""
    batch = data.draw(st.integers(1, 500))

    found = plan(gqa_shape(batch, 9000, kv_heads, group, q_len), sm_count)

    assert found.num_tiles * found.cta_group_size == kv_heads * found.m_tiles
    assert found.total_tiles == batch * found.num_tiles
    assert found.num_ctas == found.cta_group_size * found.num_cta_groups
    assert 1 <= found.num_ctas <= sm_count
    assert sm_count % found.cta_group_size <= sm_count / 25


def test_a_schedule_beyond_32_bits_is_detected() -> None:
    """Work tiles times their length are at most 2^31 - 1."""
    found = plan(gqa_shape(1 << 10), sm_count=128)  # 2^11 work tiles

    assert fits_in_int32(gqa_sm90(), found, ((1 << 20) - 1) * 128)
    assert not fits_in_int32(gqa_sm90(), found, (1 << 20) * 128)


@pytest.mark.parametrize(("sparse_block", "units"), [(0, 4), (128, 7)])
def test_fixed_splits_are_the_units_of_a_schedule(sparse_block: int, units: int) -> None:
    """A power of two of a request, and as many of 2048 tokens as a list has, as on the device."""
    spec = gqa_sm90(batch_invariant=True, page_size=128, sparse_block=sparse_block)

    assert [spec.schedule_units(tokens) for tokens in (1, 2048, 6 * 2048 + 1)] == [1, 1, units]
