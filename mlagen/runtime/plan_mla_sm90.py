"""How an MLA problem is spread over a Hopper GPU: one grid, whatever the lengths are."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from mlagen.runtime.plan import MlaProblemShape
from mlagen.spec.mla_sm90 import MlaSm90Spec

_MAX_MEMBERS = 4  # of a team

# As in scheduler/schedule_range.cuh: tokens of a block, what a unit costs besides its blocks, and
# the shortest span, in blocks.
_BLOCK_N = 64
_SWAP_AB_OVERHEAD_BLOCKS = 2
_OVERHEAD_BLOCKS = 6
_MIN_BLOCKS_PER_RANGE = 2

# As PartialRow in combine/partial_state.cuh.
_ROW_BYTES = 16

# Positions on the line of work are counted in 32 bits.
_MAX_POSITIONS = 2**31 - 1

# Whether small calls are left to the sm80 kernel: it begins sooner, and where a few blocks of
# the grid share the work, that is most of the time.
LEAVES_SMALL_CALLS = True

# What the blocks of tokens of a small call are counted for.
_SMALL_TILE_ROWS = 16

# Whether a call may take a tile of fewer rows than its requests have.
TAKES_SMALLER_TILES = True


@dataclass(frozen=True, kw_only=True)
class MlaSm90Plan:
    """Blocks and workspace of one call."""

    cta_group_size: int  # neighbouring blocks that take the tiles of one request together
    num_cta_groups: int
    blocks: int
    groups: int  # of tiles, of all requests together; of ragged ones at the most
    partial_rows_offset: int  # bytes in the scratch: the partial values come first
    workspace_bytes: int
    is_small: bool  # so that the sm80 kernel is faster


def choose_block_m(
    spec: MlaSm90Spec, problem: MlaProblemShape, tile_q_len: int, sm_count: int
) -> int:
    """Return the rows of the tile that a call is fastest with, ``spec`` being for all its rows.

    Tiles of fewer rows read the same tokens more often, but give more SMs something to do.
    """
    all_kv_blocks = problem.batch * _kv_blocks_of(problem.max_kv_len)  # of one tile of each request
    for rows, blocks_per_sm in spec.smaller_tiles if TAKES_SMALLER_TILES else ():
        tiles = -(-tile_q_len * problem.heads // rows)
        if rows < spec.block_m and tiles * all_kv_blocks <= blocks_per_sm * sm_count:
            return rows
    return spec.block_m


def plan_mla_sm90(
    spec: MlaSm90Spec, problem: MlaProblemShape, tile_q_len: int, sm_count: int
) -> MlaSm90Plan:
    """Return the plan of a call.

    ``max_kv_len`` and ``tile_q_len``, the query tokens that most requests have, decide the speed
    alone: blocks find their work by the lengths that are on the device.
    """
    rows = spec.block_m
    tiles = -(-tile_q_len * problem.heads // rows)
    cta_group_size = _cta_group_size(tiles, sm_count)
    if problem.q_len:
        groups = problem.batch * -(-tiles // cta_group_size)
    else:
        groups = -(-problem.total_rows // (rows * cta_group_size)) + problem.batch
    kv_blocks = _kv_blocks_of(problem.max_kv_len)
    num_ranges = groups * (kv_blocks + _fixed_overhead_blocks(spec)) // _MIN_BLOCKS_PER_RANGE
    num_cta_groups = (
        min(sm_count // cta_group_size, max(1, num_ranges)) if problem.total_rows else 0
    )
    blocks = num_cta_groups * cta_group_size
    # A block leaves two pieces at the most: values as halves, and of each row its state.
    partial_values = 2 * blocks * rows * spec.head_dim_vo * 2
    return MlaSm90Plan(
        cta_group_size=cta_group_size,
        num_cta_groups=num_cta_groups,
        blocks=blocks,
        groups=groups,
        partial_rows_offset=partial_values,
        workspace_bytes=partial_values + 2 * blocks * rows * _ROW_BYTES,
        is_small=_is_small(spec, tile_q_len * problem.heads, problem.batch * kv_blocks),
    )


def fits_in_int32(spec: MlaSm90Spec, plan: MlaSm90Plan, max_tokens: int) -> bool:
    """Return whether blocks can count their work, if a request has ``max_tokens`` at the most."""
    return (
        plan.groups * (_kv_blocks_of(max_tokens) + _fixed_overhead_blocks(spec)) <= _MAX_POSITIONS
    )


def _kv_blocks_of(tokens: int) -> int:
    return -(-tokens // _BLOCK_N)


def _is_small(spec: MlaSm90Spec, rows: int, kv_blocks: int) -> bool:
    """Whether the sm80 kernel is faster, for requests of ``rows`` rows."""
    most = next((blocks for max_rows, blocks in spec.small_calls if rows <= max_rows), -1)
    return LEAVES_SMALL_CALLS and kv_blocks * -(-rows // _SMALL_TILE_ROWS) <= most


def _fixed_overhead_blocks(spec: MlaSm90Spec) -> int:
    return _SWAP_AB_OVERHEAD_BLOCKS if spec.swap_ab else _OVERHEAD_BLOCKS


def _cta_group_size(tiles: int, sm_count: int) -> int:
    """Return the size that takes the fewest rounds: members idle, and so do blocks in no team.

    The larger of two that are as good: its members read the same tokens.
    """
    most = 1 if tiles == 1 else min(_MAX_MEMBERS, sm_count)
    return min(
        range(1, most + 1),
        key=lambda size: (Fraction(-(-tiles // size), sm_count // size), -size),
    )
