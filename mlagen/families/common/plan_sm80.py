"""Launch plans of the sm80 kernels: split-KV and grid size, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from mlagen.families.common.problem import LaunchPlan, ProblemShape
from mlagen.runtime.device import arch_of_device, device_facts
from mlagen.runtime.partition import WHOLE_GPU
from mlagen.spec.gqa.sm80 import GqaSm80Spec, GqaTile, gqa_sm80_spec
from mlagen.spec.gqa.variant import GqaVariant
from mlagen.spec.mla.sm80 import (
    MAX_SMALL_KV_BLOCKS,
    SMALL_TILE_ROWS,
    MlaSm80Spec,
    MlaTile,
    mla_sm80_spec,
)
from mlagen.spec.mla.variant import MlaVariant

# Cost model, in the time of a KV block whose CTA has an SM of its own. Fitted to sweeps of
# num_splits on an H200 (docs/explanation/performance.md); the SM count enters by the waves alone.
_CTA_OVERHEAD_BLOCKS = 3  # of a CTA, besides its KV blocks
_SHARED_BLOCK = 1.7  # of a KV block, where CTAs share an SM
_SHARED_CTA_OVERHEAD_PER_DIM = 1 / 256  # more overhead of such a CTA, per output dim
_COMBINE_BLOCKS = 1  # of the combine kernel
_COMBINE_BLOCKS_PER_PASS = 1 / 2  # of each of its passes
_SPLITS_PER_PASS = 32  # kSplitsPerStep of each of 4 warps in kernels/combine/combine.cuh

# Max waves of CTAs when KV is split.
_MAX_SPLIT_WAVES = 4

# Small MLA calls: tokens of a KV block, and the SMs that a limit is for.
_SMALL_KV_BLOCK = 64
_SMALL_CALL_SMS = 132


@dataclass(frozen=True, kw_only=True)
class Sm80Plan(LaunchPlan):
    """Grid and workspace of one call of an sm80 kernel."""

    m_tiles: int  # per sequence (and KV head); of all sequences if ragged


def is_small(shape: ProblemShape, max_kv_blocks: int, sm_count: int) -> bool:
    """Whether an MLA call has so many KV blocks or fewer, over all tiles of 16 query rows.

    The limit is for 132 SMs and grows with them: what a small call saves is a fixed latency, and
    each KV block of an SM costs some of it.
    """
    tiles = shape.batch * -(-shape.rows // SMALL_TILE_ROWS)
    kv_blocks = tiles * -(-shape.max_kv_len // _SMALL_KV_BLOCK)
    return kv_blocks * _SMALL_CALL_SMS <= max_kv_blocks * sm_count


@lru_cache(maxsize=4096)
def plan_sm80_call(
    device: int, variant: MlaVariant | GqaVariant, shape: ProblemShape, *, sms: int = WHOLE_GPU
) -> tuple[MlaSm80Spec | GqaSm80Spec, Sm80Plan]:
    """Return the sm80 kernel and its plan for a call on GPU ``device``, on ``sms`` SMs of it."""
    arch, rows = arch_of_device(device), shape.rows
    sm_count = sms or device_facts(device).sm_count
    spec: MlaSm80Spec | GqaSm80Spec
    if isinstance(variant, MlaVariant):
        if variant.has_small_tiles and is_small(shape, MAX_SMALL_KV_BLOCKS, sm_count):
            rows = min(rows, SMALL_TILE_ROWS)
        spec = mla_sm80_spec(arch, variant, rows)
    else:
        spec = gqa_sm80_spec(arch, variant, rows)
    return spec, plan_sm80(spec, shape, sm_count)


def max_sm80_bytes_per_sm(tiles: Iterable[MlaTile | GqaTile], dims: int) -> int:
    """Return the most bytes of a plan for each SM: CTAs of full tiles, in as many waves as allowed.

    A CTA has ``dims`` elements of a row at most.
    """
    rows = max(tile.block_m * tile.ctas_per_sm for tile in tiles)
    return _MAX_SPLIT_WAVES * rows * _partial_row_bytes(dims)


def plan_sm80(spec: MlaSm80Spec | GqaSm80Spec, shape: ProblemShape, sm_count: int) -> Sm80Plan:
    """Return the plan with the lowest modeled time, from shapes; it does not read lengths."""
    tile: MlaTile | GqaTile = spec.tile
    head_dim, slices = spec.head_dim_vo, 1
    if isinstance(spec, GqaSm80Spec):
        slices = spec.slices
        block_n = max(spec.block_n, spec.variant.sparse_block)  # splits begin at blocks of an index
    else:
        block_n = spec.tile.block_n
    if shape.q_len:
        m_tiles = -(-shape.q_len * shape.group_size // tile.block_m)
        num_ctas = shape.batch * m_tiles
    else:
        rows = shape.total_rows // shape.kv_heads
        # A tile holds rows of one sequence. Sequence b owns the tiles from floor(its first row /
        # block_m) + b on: as many as its rows need, or one more.
        num_ctas = m_tiles = rows // tile.block_m + shape.batch
    num_ctas *= shape.kv_heads * slices
    if spec.split_tokens:  # a window may begin and end inside a split
        splits = -(-shape.max_kv_len // spec.split_tokens) + (1 if shape.is_windowed else 0)
        splits = max(1, min(splits, spec.max_splits))
    else:
        splits = _splits(
            num_ctas,
            sm_count=sm_count,
            ctas_per_sm=tile.ctas_per_sm,
            kv_blocks=max(1, -(-shape.max_kv_len // block_n)),
            head_dim=head_dim,
        )
    partial_rows = splits * shape.total_rows if splits > 1 else 0
    row_splits_offset = partial_rows * _partial_row_bytes(head_dim)
    has_row_splits = spec.split_tokens > 0 and splits > 1
    return Sm80Plan(
        m_tiles=m_tiles,
        num_splits=splits,
        num_ctas=num_ctas * splits,
        partial_rows_offset=partial_rows * head_dim * 4,
        row_splits_offset=row_splits_offset,
        workspace_bytes=row_splits_offset + (shape.total_rows * 4 if has_row_splits else 0),
    )


def _splits(
    num_ctas: int, *, sm_count: int, ctas_per_sm: int, kv_blocks: int, head_dim: int
) -> int:
    slots = sm_count * ctas_per_sm
    max_splits = min(kv_blocks, max(1, _MAX_SPLIT_WAVES * slots // max(1, num_ctas)))

    def cost(splits: int) -> tuple[float, int]:
        waves = -(-num_ctas * splits // slots)
        blocks_per_split = -(-kv_blocks // splits)
        cta: float = _CTA_OVERHEAD_BLOCKS + blocks_per_split
        if ctas_per_sm > 1 and num_ctas * splits > sm_count:
            cta = _CTA_OVERHEAD_BLOCKS + _SHARED_BLOCK * blocks_per_split
            cta += _SHARED_CTA_OVERHEAD_PER_DIM * head_dim
        passes = -(-splits // _SPLITS_PER_PASS)
        combine = _COMBINE_BLOCKS + _COMBINE_BLOCKS_PER_PASS * passes if splits > 1 else 0
        return waves * cta + combine, splits

    splits = min(range(1, max_splits + 1), key=cost)
    return -(-kv_blocks // -(-kv_blocks // splits))  # no empty split


def _partial_row_bytes(dims: int) -> int:
    """Return the bytes of a partial row and its LSE, both in fp32."""
    return (dims + 1) * 4
