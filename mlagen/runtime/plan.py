"""How a problem is spread over a device: splits and grids, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

from mlagen.spec.gqa import GqaDecodeSpec
from mlagen.spec.mla import MlaDecodeSpec

# In the time of a tile, where a block has its SM for itself: what a block costs besides its tiles;
# what a tile costs where blocks share an SM, and such a block besides, for each output dim; what
# combining costs, and how much for as many splits as it reads at once. Fitted to sweeps of the
# splits on an H200; see docs/measurements.md.
_BLOCK_TILES = 3
_SHARED_TILE = 1.7
_SHARED_BLOCK_TILES_PER_DIM = 1 / 256
_COMBINE_TILES = 1
_COMBINE_TILES_PER_PASS = 1 / 2
_SPLITS_OF_PASS = 32  # kSplitsAtOnce of each warp in kernels/combine/combine_splits.cuh

# Blocks at the most, in multiples of what the device holds at once, when tokens are split.
_MOST_WAVES_OF_SPLITS = 4


@dataclass(frozen=True, kw_only=True)
class MlaDecodeProblem:
    """What changes the launch of an MLA decode kernel, and not its code.

    Of a sparse call every query token is a request of its own, and ``longest_kv`` the most tokens
    that its list names.
    """

    batch: int
    q_len: int  # of every request; 0 where requests differ
    heads: int
    total_rows: int  # query tokens of all requests, times heads
    longest_kv: int  # tokens, at the most


@dataclass(frozen=True, kw_only=True)
class GqaDecodeProblem:
    """What changes the launch of a GQA decode kernel, and not its code."""

    batch: int
    q_len: int  # of every request; 0 where requests differ
    heads: int
    kv_heads: int
    total_rows: int  # query tokens of all requests, times heads
    longest_kv: int  # tokens that a row may see, at the most


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """Blocks and workspace of one call."""

    row_tiles: int  # of one request (and kv head); of all requests where their queries differ
    splits: int
    blocks: int
    partial_rows: int
    workspace_bytes: int


def plan_mla_decode(spec: MlaDecodeSpec, problem: MlaDecodeProblem, sm_count: int) -> DecodePlan:
    """Return the plan that finishes first by a count of waves; lengths are not looked at."""
    rows = spec.tile.tile_rows
    if problem.q_len:
        row_tiles = -(-problem.q_len * problem.heads // rows)
        blocks = problem.batch * row_tiles
    else:
        blocks = row_tiles = _ragged_tiles(problem.total_rows, rows, problem.batch)
    splits = _splits(
        blocks,
        sm_count=sm_count,
        blocks_per_sm=spec.tile.blocks_per_sm,
        tiles=-(-problem.longest_kv // spec.tile.tile_tokens),
        head_dim=spec.head_dim_vo,
    )
    return _plan(row_tiles, splits, blocks, problem.total_rows, spec.head_dim_vo)


def plan_gqa_decode(spec: GqaDecodeSpec, problem: GqaDecodeProblem, sm_count: int) -> DecodePlan:
    """Return the plan that finishes first by a count of waves; lengths are not looked at."""
    rows = spec.tile.tile_rows
    group = problem.heads // problem.kv_heads
    if problem.q_len:
        row_tiles = -(-problem.q_len * group // rows)
        blocks = problem.batch * row_tiles
    else:
        blocks = row_tiles = _ragged_tiles(
            problem.total_rows // problem.kv_heads, rows, problem.batch
        )
    blocks *= problem.kv_heads * spec.slices
    splits = _splits(
        blocks,
        sm_count=sm_count,
        blocks_per_sm=spec.tile.blocks_per_sm,
        tiles=-(-problem.longest_kv // spec.tile_tokens),
        head_dim=spec.variant.head_dim,
    )
    return _plan(row_tiles, splits, blocks, problem.total_rows, spec.variant.head_dim)


def _ragged_tiles(total_rows: int, tile_rows: int, batch: int) -> int:
    """Return how many tiles hold the rows of requests of unknown lengths, each tile of one request.

    Request b takes the tiles from ``floor(its first row / tile_rows) + b`` on: as many as it has
    rows for, or one more.
    """
    return total_rows // tile_rows + batch


def _splits(blocks: int, *, sm_count: int, blocks_per_sm: int, tiles: int, head_dim: int) -> int:
    tiles = max(1, tiles)
    slots = sm_count * blocks_per_sm
    most = min(tiles, max(1, _MOST_WAVES_OF_SPLITS * slots // max(1, blocks)))

    def cost(splits: int) -> tuple[float, int]:
        waves = -(-blocks * splits // slots)
        tiles_per_split = -(-tiles // splits)
        block: float = _BLOCK_TILES + tiles_per_split
        if blocks_per_sm > 1 and blocks * splits > sm_count:
            block = _BLOCK_TILES + _SHARED_TILE * tiles_per_split
            block += _SHARED_BLOCK_TILES_PER_DIM * head_dim
        passes = -(-splits // _SPLITS_OF_PASS)
        combining = _COMBINE_TILES + _COMBINE_TILES_PER_PASS * passes if splits > 1 else 0
        return waves * block + combining, splits

    splits = min(range(1, most + 1), key=cost)
    return -(-tiles // -(-tiles // splits))  # no split without a tile


def _plan(row_tiles: int, splits: int, blocks: int, total_rows: int, head_dim: int) -> DecodePlan:
    partial_rows = splits * total_rows if splits > 1 else 0
    return DecodePlan(
        row_tiles=row_tiles,
        splits=splits,
        blocks=blocks * splits,
        partial_rows=partial_rows,
        workspace_bytes=partial_rows * (head_dim + 1) * 4,
    )
