"""How a problem is spread over a device: splits and grids, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

from mlagen.spec.mla import MlaDecodeSpec

# What a block costs besides its tiles, what combining costs once and for each split, in tiles of
# time. Fitted to sweeps of the splits on an H200; see docs/measurements.md.
_BLOCK_OVERHEAD_TILES = 3
_COMBINE_TILES = 4
_COMBINE_TILES_PER_SPLIT = 1 / 20

# Blocks at the most, in multiples of what the device holds at once, when tokens are split.
_MOST_WAVES_OF_SPLITS = 4


@dataclass(frozen=True, kw_only=True)
class MlaDecodeProblem:
    """What changes the launch of an MLA decode kernel, and not its code."""

    batch: int
    q_len: int  # the longest, where requests differ
    heads: int
    total_rows: int  # query tokens of all requests, times heads
    longest_kv: int  # tokens, at the most


@dataclass(frozen=True, kw_only=True)
class MlaDecodePlan:
    """Blocks and workspace of one call."""

    row_tiles: int
    splits: int
    blocks: int
    partial_rows: int
    workspace_bytes: int


def plan_mla_decode(spec: MlaDecodeSpec, problem: MlaDecodeProblem, sm_count: int) -> MlaDecodePlan:
    """Return the plan that finishes first by a count of waves; lengths are not looked at."""
    row_tiles = -(-problem.q_len * problem.heads // spec.tile_rows)
    blocks = problem.batch * row_tiles
    slots = sm_count * spec.blocks_per_sm
    tiles = max(1, -(-problem.longest_kv // spec.tile_tokens))
    most = min(tiles, max(1, _MOST_WAVES_OF_SPLITS * slots // max(1, blocks)))

    def cost(splits: int) -> tuple[float, int]:
        waves = -(-blocks * splits // slots)
        tiles_per_split = -(-tiles // splits)
        combining = _COMBINE_TILES + _COMBINE_TILES_PER_SPLIT * splits if splits > 1 else 0
        return waves * (tiles_per_split + _BLOCK_OVERHEAD_TILES) + combining, splits

    splits = min(range(1, most + 1), key=cost)
    splits = -(-tiles // -(-tiles // splits))  # no split without a tile
    partial_rows = splits * problem.total_rows if splits > 1 else 0
    return MlaDecodePlan(
        row_tiles=row_tiles,
        splits=splits,
        blocks=blocks * splits,
        partial_rows=partial_rows,
        workspace_bytes=partial_rows * (spec.head_dim_vo + 1) * 4,
    )
