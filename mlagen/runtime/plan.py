"""How a problem is spread over a device: splits and grids, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

from mlagen.spec.gqa import GqaSm80Spec
from mlagen.spec.mla import MlaSm80Spec

# In the time of a tile, where a block has its SM for itself: what a block costs besides its tiles;
# what a tile costs where blocks share an SM, and such a block besides, for each output dim; what
# combining costs, and how much for as many splits as it reads at once. Fitted to sweeps of the
# splits on an H200; see docs/measurements.md.
_BLOCK_TILES = 3
_SHARED_TILE = 1.7
_SHARED_BLOCK_TILES_PER_DIM = 1 / 256
_COMBINE_TILES = 1
_COMBINE_TILES_PER_PASS = 1 / 2
_SPLITS_OF_PASS = 32  # kSplitsAtOnce of each warp in kernels/combine/combine.cuh

# Blocks at the most, in multiples of what the device holds at once, when tokens are split.
_MAX_WAVES_OF_SPLITS = 4


@dataclass(frozen=True, kw_only=True)
class MlaProblemShape:
    """What changes the launch of an MLA decode kernel, and not its code.

    Of a sparse call every query token is a request of its own, and ``max_kv_len`` the most tokens
    that its list names.
    """

    batch: int
    q_len: int  # of every request; 0 where requests differ
    heads: int
    total_rows: int  # query tokens of all requests, times heads
    max_kv_len: int  # tokens, at the most


@dataclass(frozen=True, kw_only=True)
class GqaProblemShape:
    """What changes the launch of a GQA decode kernel, and not its code."""

    batch: int
    q_len: int  # of every request; 0 where requests differ
    heads: int
    kv_heads: int
    total_rows: int  # query tokens of all requests, times heads
    max_kv_len: int  # tokens that a row may see, at the most


@dataclass(frozen=True, kw_only=True)
class Sm80Plan:
    """Blocks and workspace of one call."""

    row_tiles: int  # of one request (and kv head); of all requests where their queries differ
    splits: int
    blocks: int
    partial_rows: int
    workspace_bytes: int


def plan_mla_sm80(spec: MlaSm80Spec, problem: MlaProblemShape, sm_count: int) -> Sm80Plan:
    """Return the plan that finishes first by a count of waves; lengths are not looked at."""
    rows = spec.tile.block_m
    if problem.q_len:
        row_tiles = -(-problem.q_len * problem.heads // rows)
        blocks = problem.batch * row_tiles
    else:
        blocks = row_tiles = _ragged_tiles(problem.total_rows, rows, problem.batch)
    splits = _splits(
        blocks,
        sm_count=sm_count,
        ctas_per_sm=spec.tile.ctas_per_sm,
        tiles=-(-problem.max_kv_len // spec.tile.block_n),
        head_dim=spec.head_dim_vo,
    )
    return _plan(row_tiles, splits, blocks, problem.total_rows, spec.head_dim_vo)


def plan_gqa_sm80(spec: GqaSm80Spec, problem: GqaProblemShape, sm_count: int) -> Sm80Plan:
    """Return the plan that finishes first by a count of waves; lengths are not looked at."""
    rows = spec.tile.block_m
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
        ctas_per_sm=spec.tile.ctas_per_sm,
        tiles=-(-problem.max_kv_len // spec.block_n),
        head_dim=spec.variant.head_dim,
    )
    return _plan(row_tiles, splits, blocks, problem.total_rows, spec.variant.head_dim)


def _ragged_tiles(total_rows: int, block_m: int, batch: int) -> int:
    """Return how many tiles hold the rows of requests of unknown lengths, each tile of one request.

    Request b takes the tiles from ``floor(its first row / block_m) + b`` on: as many as it has
    rows for, or one more.
    """
    return total_rows // block_m + batch


def _splits(blocks: int, *, sm_count: int, ctas_per_sm: int, tiles: int, head_dim: int) -> int:
    tiles = max(1, tiles)
    slots = sm_count * ctas_per_sm
    most = min(tiles, max(1, _MAX_WAVES_OF_SPLITS * slots // max(1, blocks)))

    def cost(splits: int) -> tuple[float, int]:
        waves = -(-blocks * splits // slots)
        tiles_per_split = -(-tiles // splits)
        block: float = _BLOCK_TILES + tiles_per_split
        if ctas_per_sm > 1 and blocks * splits > sm_count:
            block = _BLOCK_TILES + _SHARED_TILE * tiles_per_split
            block += _SHARED_BLOCK_TILES_PER_DIM * head_dim
        passes = -(-splits // _SPLITS_OF_PASS)
        combining = _COMBINE_TILES + _COMBINE_TILES_PER_PASS * passes if splits > 1 else 0
        return waves * block + combining, splits

    splits = min(range(1, most + 1), key=cost)
    return -(-tiles // -(-tiles // splits))  # no split without a tile


def _plan(row_tiles: int, splits: int, blocks: int, total_rows: int, head_dim: int) -> Sm80Plan:
    partial_rows = splits * total_rows if splits > 1 else 0
    return Sm80Plan(
        row_tiles=row_tiles,
        splits=splits,
        blocks=blocks * splits,
        partial_rows=partial_rows,
        workspace_bytes=partial_rows * (head_dim + 1) * 4,
    )
