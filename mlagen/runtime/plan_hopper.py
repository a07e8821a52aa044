"""How an MLA problem is spread over a Hopper GPU: one grid, whatever the lengths are."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from mlagen.runtime.plan import MlaDecodeProblem
from mlagen.spec.mla_hopper import MlaHopperSpec

_MOST_MEMBERS = 4  # of a team

# As in scheduler/schedule_range.cuh: tokens of a block, what a unit costs besides its blocks, and
# the shortest span, in blocks.
_BLOCK_TOKENS = 64
_NARROW_UNIT_COST = 2
_WIDE_UNIT_COST = 6
_LEAST_SPAN = 2

# As PartialRow in combine/partial_state.cuh.
_ROW_BYTES = 16

# Positions on the line of work are counted in 32 bits.
_MOST_POSITIONS = 2**31 - 1

# Whether small calls are left to the portable kernel: it begins sooner, and where a few blocks of
# the grid share the work, that is most of the time.
LEAVES_SMALL_CALLS = True

# What the blocks of tokens of a small call are counted for.
_SMALL_TILE_ROWS = 16

# Whether a call may take a tile of fewer rows than its requests have.
TAKES_SMALLER_TILES = True


@dataclass(frozen=True, kw_only=True)
class HopperPlan:
    """Blocks and workspace of one call."""

    team_size: int  # neighbouring blocks that take the tiles of one request together
    teams: int
    blocks: int
    groups: int  # of tiles, of all requests together; of ragged ones at the most
    partial_rows_offset: int  # bytes in the scratch: the partial values come first
    workspace_bytes: int
    is_small: bool  # so that the portable kernel is faster


def rows_of_tile(
    spec: MlaHopperSpec, problem: MlaDecodeProblem, tile_q_len: int, sm_count: int
) -> int:
    """Return the rows of the tile that a call is fastest with, ``spec`` being for all its rows.

    Tiles of fewer rows read the same tokens more often, but give more SMs something to do.
    """
    all_blocks = problem.batch * _blocks_of(problem.longest_kv)  # of one tile of each request
    for rows, blocks_of_sm in spec.smaller_tiles if TAKES_SMALLER_TILES else ():
        tiles = -(-tile_q_len * problem.heads // rows)
        if rows < spec.tile_rows and tiles * all_blocks <= blocks_of_sm * sm_count:
            return rows
    return spec.tile_rows


def plan_mla_hopper(
    spec: MlaHopperSpec, problem: MlaDecodeProblem, tile_q_len: int, sm_count: int
) -> HopperPlan:
    """Return the plan of a call.

    ``longest_kv`` and ``tile_q_len``, the query tokens that most requests have, decide the speed
    alone: blocks find their work by the lengths that are on the device.
    """
    rows = spec.tile_rows
    tiles = -(-tile_q_len * problem.heads // rows)
    team_size = _team_size(tiles, sm_count)
    if problem.q_len:
        groups = problem.batch * -(-tiles // team_size)
    else:
        groups = -(-problem.total_rows // (rows * team_size)) + problem.batch
    blocks_of_tokens = _blocks_of(problem.longest_kv)
    spans = groups * (blocks_of_tokens + _unit_cost(spec)) // _LEAST_SPAN
    teams = min(sm_count // team_size, max(1, spans)) if problem.total_rows else 0
    blocks = teams * team_size
    # A block leaves two pieces at the most: values as halves, and of each row its state.
    partial_values = 2 * blocks * rows * spec.head_dim_vo * 2
    return HopperPlan(
        team_size=team_size,
        teams=teams,
        blocks=blocks,
        groups=groups,
        partial_rows_offset=partial_values,
        workspace_bytes=partial_values + 2 * blocks * rows * _ROW_BYTES,
        is_small=_is_small(spec, tile_q_len * problem.heads, problem.batch * blocks_of_tokens),
    )


def line_fits(spec: MlaHopperSpec, plan: HopperPlan, most_tokens: int) -> bool:
    """Return whether blocks can count their work, if a request has ``most_tokens`` at the most."""
    return plan.groups * (_blocks_of(most_tokens) + _unit_cost(spec)) <= _MOST_POSITIONS


def _blocks_of(tokens: int) -> int:
    return -(-tokens // _BLOCK_TOKENS)


def _is_small(spec: MlaHopperSpec, rows: int, blocks_of_tokens: int) -> bool:
    """Whether the portable kernel is faster, for requests of ``rows`` rows."""
    most = next((blocks for most_rows, blocks in spec.small_calls if rows <= most_rows), -1)
    return LEAVES_SMALL_CALLS and blocks_of_tokens * -(-rows // _SMALL_TILE_ROWS) <= most


def _unit_cost(spec: MlaHopperSpec) -> int:
    return _NARROW_UNIT_COST if spec.is_narrow else _WIDE_UNIT_COST


def _team_size(tiles: int, sm_count: int) -> int:
    """Return the size that takes the fewest rounds: members idle, and so do blocks in no team.

    The larger of two that are as good: its members read the same tokens.
    """
    most = 1 if tiles == 1 else min(_MOST_MEMBERS, sm_count)
    return min(
        range(1, most + 1),
        key=lambda size: (Fraction(-(-tiles // size), sm_count // size), -size),
    )
