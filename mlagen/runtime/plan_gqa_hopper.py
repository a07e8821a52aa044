"""How a GQA problem is spread over a Hopper GPU: one grid, whatever the lengths are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from mlagen.runtime.plan import GqaDecodeProblem
from mlagen.spec.gqa_hopper import GqaHopperSpec

# As RowState in kernels/gqa_sm90/shared_memory.cuh.
_ROW_STATE_BYTES = 8

# Positions on the line of work, times teams, are counted in 32 bits.
_MOST_PRODUCTS = 2**32 - 1


# Kv heads whose parts of a token are as many bytes are read together: memory is the faster for it,
# and for no more.
_MOST_TOGETHER_BYTES = 1024

# What a call takes, in microseconds, as far as the number of teams decides it: fitted to an H200,
# and of use for the order alone. See docs/measurements.md.
_BYTES_PER_US = 4_500_000  # that all SMs read
_BYTES_PER_US_OF_SM = 160_000  # and one by itself
_DECODED_PER_US_OF_SM = 85_000  # if it has to turn them into another type
_MERGE_US = 1.3  # of having pieces to merge
_PIECE_US = 0.1  # of each of them
_UNEVEN_US = 2.0  # of items in a block that are no whole units, and of no equal pieces
_IDLE_LOSS = 0.012  # of the rate, if any SM reads nothing
_SHARE_LOSS = 0.3  # and if none did

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
    all_units: int  # of all requests; of ragged ones at the most, if their offsets never go back
    partial_rows_offset: int  # bytes in the scratch: the values of pieces come first
    workspace_bytes: int


def plan_gqa_hopper(spec: GqaHopperSpec, problem: GqaDecodeProblem, sm_count: int) -> GqaHopperPlan:
    """Return the plan of a call.

    ``longest_kv`` decides the speed alone: blocks find their work by the lengths that are on the
    device.
    """
    rows = spec.tile_rows
    row_tiles = -(-problem.q_len * (problem.heads // problem.kv_heads) // rows)
    parts = problem.kv_heads // spec.block_heads * max(row_tiles, 1)
    together = max(row_tiles, _MOST_TOGETHER_BYTES // spec.token_bytes)
    team_size = _team_size(parts, together, sm_count)
    units = parts // team_size
    all_units = problem.batch * units
    if not problem.q_len:
        all_units += problem.total_rows // (problem.kv_heads * rows) * units
    tiles = max(1, -(-problem.longest_kv // spec.tile_tokens))
    # Where a window begins inside a tile, there is one more.
    most_teams = min(sm_count // team_size, all_units * (tiles + 1)) if problem.total_rows else 0
    is_even = problem.q_len > 0  # as far as is known: else requests differ at least in their rows
    teams = _teams(spec, all_units, tiles, team_size, most_teams) if is_even else most_teams
    blocks = teams * team_size
    # A block leaves two pieces at the most: values in fp32, and of each row its state.
    partial_rows = 2 * blocks * spec.block_heads * rows
    partial_values = partial_rows * spec.variant.head_dim * 4
    return GqaHopperPlan(
        team_size=team_size,
        teams=teams,
        blocks=blocks,
        row_tiles=row_tiles,
        units=units,
        all_units=all_units,
        partial_rows_offset=partial_values,
        workspace_bytes=partial_values + partial_rows * _ROW_STATE_BYTES,
    )


def heads_of_block(spec: GqaHopperSpec, problem: GqaDecodeProblem, sm_count: int) -> int:
    """Return how many kv heads a block should take.

    As many as a kernel is for, where that leaves nearly all SMs a whole unit: memory is the faster
    for it, and half or a quarter as many items come to an end. Else one, for units of several heads
    would lie in more pieces.
    """
    heads = math.gcd(problem.kv_heads, spec.most_heads)
    plan = plan_gqa_hopper(replace(spec, block_heads=heads), problem, sm_count)
    wanted = sm_count // plan.team_size * (1 - _MOST_IDLE)
    return heads if problem.batch * plan.units >= wanted else 1


def line_fits(spec: GqaHopperSpec, plan: GqaHopperPlan, most_tokens: int) -> bool:
    """Return whether blocks can count their work, if a request has ``most_tokens`` at the most."""
    tiles_of_tokens = max(1, -(-most_tokens // spec.tile_tokens))
    return plan.all_units * tiles_of_tokens * plan.teams <= _MOST_PRODUCTS


def _teams(spec: GqaHopperSpec, units: int, tiles: int, team_size: int, most_teams: int) -> int:
    """Return how many teams take the least time, if all requests are as long as the longest.

    Where several teams share a unit evenly, or a team has whole ones, there is less to begin and
    to merge; and merging many pieces may take longer than reading the tokens.
    """
    if most_teams == 0:
        return 0
    even = [units * pieces for pieces in range(1, most_teams // units + 1)]
    if not even:
        even = [max(teams for teams in range(1, most_teams + 1) if units % teams == 0)]
    tile_bytes = 2 * spec.tile_tokens * spec.token_bytes
    rate_of_sm = _DECODED_PER_US_OF_SM if spec.decodes_kv else _BYTES_PER_US_OF_SM

    def microseconds(teams: int) -> float:
        idle = 1 - teams / most_teams
        loss = _SHARE_LOSS * idle + (_IDLE_LOSS if idle else 0.0)
        blocks = teams * team_size
        rate = min(_BYTES_PER_US * (1 - loss), rate_of_sm * blocks)
        is_even = teams in even
        pieces = -(-teams // units) + (0 if is_even else 1)
        merging = _MERGE_US + _PIECE_US * pieces if pieces > 1 else 0.0
        reading = -(-units * tiles // teams) * blocks * tile_bytes / rate
        return reading + merging + (0.0 if is_even else _UNEVEN_US)

    return min((*even, most_teams), key=lambda teams: (microseconds(teams), -teams))


def _team_size(parts: int, together: int, sm_count: int) -> int:
    """Return the largest divisor of ``parts`` up to ``together`` whose teams leave few SMs idle."""
    most = min(parts, together, sm_count)
    sizes = [size for size in range(1, most + 1) if parts % size == 0]
    return max(size for size in sizes if sm_count % size <= sm_count * _MOST_IDLE)
