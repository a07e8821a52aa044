"""Launch plan of the sm90 MLA kernels: a persistent grid of CTA groups, for any lengths."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from mlagen.families.common.problem import ProblemShape
from mlagen.spec.mla.sm90 import MlaSm90Spec
from mlagen.values import INT32_MAX

_MAX_CTA_GROUP_SIZE = 4

# Max share of SMs that stay idle in favor of a larger CTA group, whose M tiles read the KV of a
# sequence once.
_MAX_IDLE = Fraction(1, 25)

# Rows of a tile in the KV-block count of a small call.
_SMALL_TILE_ROWS = 16

# SM count that the limits of small calls are for. They grow with the SMs: the sm80 kernel saves a
# fixed latency, and takes longer for each KV block of an SM.
_SMALL_CALL_SMS = 132


@dataclass(frozen=True, kw_only=True)
class MlaSm90Plan:
    """Grid and workspace of one call."""

    cta_group_size: int  # CTAs that process M tiles of one sequence together
    num_cta_groups: int
    num_ctas: int
    total_tiles: int  # work tiles of all sequences; an upper bound if ragged
    partial_rows_offset: int  # bytes in the workspace; the partial outputs come first
    workspace_bytes: int
    is_small: bool  # the sm80 kernel is faster


def choose_block_m(spec: MlaSm90Spec, shape: ProblemShape, sm_count: int) -> int:
    """Return the fastest BLOCK_M for a call; ``spec`` has the default one.

    Smaller tiles read the same tokens more often, but occupy more SMs.
    """
    # Of one M tile per sequence.
    kv_blocks = shape.batch * _kv_blocks_of(spec, shape.max_kv_len)
    for rows, kv_blocks_per_sm in spec.smaller_tiles:
        tiles = -(-shape.rows // rows)
        if rows < spec.block_m and tiles * kv_blocks <= kv_blocks_per_sm * sm_count:
            return rows
    return spec.block_m


def plan_mla_sm90(spec: MlaSm90Spec, shape: ProblemShape, sm_count: int) -> MlaSm90Plan:
    """Return the plan of a call.

    ``max_kv_len`` and ``tile_q_len``, the typical query length, affect only the speed: CTAs derive
    their ranges from the lengths on the device.
    """
    rows = spec.block_m
    tiles = -(-shape.rows // rows)
    cta_group_size = _cta_group_size(tiles, sm_count)
    if shape.q_len:
        total_tiles = shape.batch * -(-tiles // cta_group_size)
    else:
        total_tiles = -(-shape.total_rows // (rows * cta_group_size)) + shape.batch
    kv_blocks = _kv_blocks_of(spec, shape.max_kv_len)
    total_blocks = total_tiles * (kv_blocks + spec.fixed_overhead_blocks)
    num_ranges = total_blocks // spec.min_blocks_per_range
    num_cta_groups = min(sm_count // cta_group_size, max(1, num_ranges)) if shape.total_rows else 0
    num_ctas = num_cta_groups * cta_group_size
    return MlaSm90Plan(
        cta_group_size=cta_group_size,
        num_cta_groups=num_cta_groups,
        num_ctas=num_ctas,
        total_tiles=total_tiles,
        partial_rows_offset=num_ctas * _partial_rows(spec) * spec.head_dim_vo * 2,
        workspace_bytes=num_ctas * mla_sm90_bytes_per_cta(spec),
        is_small=is_small_call(spec, shape, sm_count),
    )


def is_small_call(spec: MlaSm90Spec, shape: ProblemShape, sm_count: int) -> bool:
    """Whether the sm80 kernel is faster: its prologue is shorter, which dominates few CTAs."""
    limit = next((blocks for max_rows, blocks in spec.small_calls if shape.rows <= max_rows), -1)
    tiles = shape.batch * -(-shape.rows // _SMALL_TILE_ROWS)
    tile_blocks = tiles * _kv_blocks_of(spec, shape.max_kv_len)
    return tile_blocks * _SMALL_CALL_SMS <= limit * sm_count


def mla_sm90_bytes_per_cta(spec: MlaSm90Spec) -> int:
    """Return the workspace of a CTA: partial outputs in fp16, and a PartialState per row."""
    return _partial_rows(spec) * (spec.head_dim_vo * 2 + spec.partial_state_bytes)


def _partial_rows(spec: MlaSm90Spec) -> int:
    return 2 * spec.block_m  # a CTA stores at most two splits


def fits_in_int32(spec: MlaSm90Spec, plan: MlaSm90Plan, max_tokens: int) -> bool:
    """Return whether linear block indices fit in 32 bits, for up to ``max_tokens`` a sequence."""
    blocks_per_tile = _kv_blocks_of(spec, max_tokens) + spec.fixed_overhead_blocks
    return plan.total_tiles * blocks_per_tile <= INT32_MAX


def _kv_blocks_of(spec: MlaSm90Spec, tokens: int) -> int:
    return -(-tokens // spec.block_n)


def _cta_group_size(tiles: int, sm_count: int) -> int:
    """Return the group size with the fewest waves, counting idle ranks and ungrouped CTAs.

    Up to ``_MAX_IDLE`` of ungrouped CTAs do not count. Of equal sizes the larger: CTAs of a group
    read the same tokens.
    """
    max_size = 1 if tiles == 1 else min(_MAX_CTA_GROUP_SIZE, sm_count)

    def waves(size: int) -> Fraction:
        idle = sm_count % size
        busy = sm_count if idle <= _MAX_IDLE * sm_count else sm_count - idle
        return Fraction(-(-tiles // size) * size, busy)

    return min(range(1, max_size + 1), key=lambda size: (waves(size), -size))
