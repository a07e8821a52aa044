"""How a GQA problem is spread over a Hopper GPU: one grid, whatever the lengths are."""

from __future__ import annotations

from dataclasses import dataclass

from mlagen.runtime.plan import GqaDecodeProblem
from mlagen.spec.gqa_hopper import GqaHopperSpec

# As RowState in roles/gqa_hopper/shared_memory.cuh.
_ROW_STATE_BYTES = 8

# Positions on the line of work, times blocks, are counted in 32 bits.
_MOST_PRODUCTS = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class GqaHopperPlan:
    """Blocks and workspace of one call."""

    row_tiles: int  # of each kv head of a request; 0 where requests differ
    units: int  # tiles of rows of all requests and kv heads; of ragged ones at the most
    blocks: int
    partial_rows_offset: int  # bytes in the workspace: the values of pieces come first
    workspace_bytes: int


def plan_gqa_hopper(spec: GqaHopperSpec, problem: GqaDecodeProblem, sm_count: int) -> GqaHopperPlan:
    """Return the plan of a call.

    ``longest_kv`` decides the speed alone: blocks find their work by the lengths that are on the
    device.
    """
    rows = spec.tile_rows
    row_tiles = -(-problem.q_len * (problem.heads // problem.kv_heads) // rows)
    if problem.q_len:
        units = problem.batch * problem.kv_heads * row_tiles
    else:
        units = problem.total_rows // rows + problem.batch * problem.kv_heads
    tiles_of_tokens = -(-problem.longest_kv // spec.tile_tokens) + 1  # they begin anywhere
    blocks = min(sm_count, units * tiles_of_tokens) if problem.total_rows else 0
    # A block leaves two pieces at the most: values in fp32, and of each row its state.
    partial_values = 2 * blocks * rows * spec.variant.head_dim * 4
    return GqaHopperPlan(
        row_tiles=row_tiles,
        units=units,
        blocks=blocks,
        partial_rows_offset=partial_values,
        workspace_bytes=partial_values + 2 * blocks * rows * _ROW_STATE_BYTES,
    )


def line_fits(spec: GqaHopperSpec, plan: GqaHopperPlan, most_tokens: int) -> bool:
    """Return whether blocks can count their work, if a request has ``most_tokens`` at the most."""
    tiles_of_tokens = max(1, -(-most_tokens // spec.tile_tokens))
    return plan.units * tiles_of_tokens * plan.blocks <= _MOST_PRODUCTS
