"""How a GQA problem is spread over a Hopper GPU: one grid, whatever the lengths are."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from mlagen.runtime.plan import GqaDecodeProblem
from mlagen.spec.gqa_hopper import GqaHopperSpec

# As RowState in roles/gqa_hopper/shared_memory.cuh.
_ROW_STATE_BYTES = 8

# Positions on the line of work, times teams, are counted in 32 bits.
_MOST_PRODUCTS = 2**32 - 1


# Of the SMs a team size may leave so many without work, for the sake of a larger team.
_MOST_IDLE = Fraction(1, 25)


@dataclass(frozen=True, kw_only=True)
class GqaHopperPlan:
    """Blocks and workspace of one call."""

    team_size: int  # neighbouring blocks that take kv heads, and tiles of rows, together
    teams: int
    blocks: int
    row_tiles: int  # of each kv head of a request; 0 where requests differ
    units: int  # of a request; where requests differ, for each tile of rows that a kv head has
    all_units: int  # of all requests; of ragged ones at the most
    partial_rows_offset: int  # bytes in the workspace: the values of pieces come first
    workspace_bytes: int


def plan_gqa_hopper(spec: GqaHopperSpec, problem: GqaDecodeProblem, sm_count: int) -> GqaHopperPlan:
    """Return the plan of a call.

    ``longest_kv`` decides the speed alone: blocks find their work by the lengths that are on the
    device.
    """
    rows = spec.tile_rows
    row_tiles = -(-problem.q_len * (problem.heads // problem.kv_heads) // rows)
    parts = problem.kv_heads * max(row_tiles, 1)
    team_size = _team_size(parts, sm_count)
    units = parts // team_size
    all_units = problem.batch * units
    if not problem.q_len:
        all_units += problem.total_rows // (problem.kv_heads * rows) * units
    tiles_of_tokens = -(-problem.longest_kv // spec.tile_tokens) + 1  # they begin anywhere
    teams = min(sm_count // team_size, all_units * tiles_of_tokens) if problem.total_rows else 0
    blocks = teams * team_size
    # A block leaves two pieces at the most: values in fp32, and of each row its state.
    partial_values = 2 * blocks * rows * spec.variant.head_dim * 4
    return GqaHopperPlan(
        team_size=team_size,
        teams=teams,
        blocks=blocks,
        row_tiles=row_tiles,
        units=units,
        all_units=all_units,
        partial_rows_offset=partial_values,
        workspace_bytes=partial_values + 2 * blocks * rows * _ROW_STATE_BYTES,
    )


def line_fits(spec: GqaHopperSpec, plan: GqaHopperPlan, most_tokens: int) -> bool:
    """Return whether blocks can count their work, if a request has ``most_tokens`` at the most."""
    tiles_of_tokens = max(1, -(-most_tokens // spec.tile_tokens))
    return plan.all_units * tiles_of_tokens * plan.teams <= _MOST_PRODUCTS


def _team_size(parts: int, sm_count: int) -> int:
    """Return the largest divisor of ``parts`` whose teams leave few SMs idle."""
    sizes = [size for size in range(1, min(parts, sm_count) + 1) if parts % size == 0]
    return max(size for size in sizes if sm_count % size <= sm_count * _MOST_IDLE)
