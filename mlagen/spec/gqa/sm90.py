"""Spec of the sm90 GQA decode kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from mlagen.spec.arch import Arch
from mlagen.spec.dtype import TOKEN_SCALE_BYTES, DType
from mlagen.spec.gqa.variant import (
    CACHE_SCALE_PARAMETERS,
    HEAD_DIMS,
    MAX_HEAD_DIM,
    NVFP4_BLOCK,
    PROBLEM_PARAMETERS,
    QUANTIZED_DTYPES,
    SCALE_PARAMETERS,
    GqaSpec,
    GqaVariant,
)
from mlagen.spec.kernel import CallShape, Parameter, parameters

# BLOCK_M of the tiles, largest first. A call uses the smallest tile that holds the rows of a
# sequence and KV head, or else the largest whose accumulators fit the registers.
BLOCK_MS = (32, 16, 8)
_MAX_ACCUMULATORS = 32 * 128  # rows times dims of a warp

_CONSUMER_WARPS = 8
_STEP_TOKENS = 16  # per warp
_DIM_TILE = 16  # of an MMA
# A converted KV cache costs twice the work per byte, so a warp keeps two steps in flight where
# registers allow it, beside the scores of up to 16 rows.
_MAX_TWO_STEP_ACCUMULATORS = 8 * 128  # rows times dims
_MAX_TWO_STEP_ROWS = 16
_MIN_BOX_TOKENS = 16
_MAX_REGISTER_QUERY = 16 * 128  # rows times dims of Q that fit registers beside the accumulators
_MAX_PART_DIMS = 256  # output dims of a warp
_LINE_BYTES = 128  # width of the shared-memory swizzle
_SWIZZLED_LINES = 8  # after which it repeats
_ROW_STEP_BYTES = 32  # of ldmatrix
_TOKEN_BYTES = 256  # max bytes per token that a CTA reads of several KV heads; more is no faster
_MAX_KV_HEADS_PER_CTA = 4  # two warps of each have KV blocks of 64 tokens
# By the bytes of a key, of the next larger one here. CTAs that read neighboring heads drift apart
# by up to a ring, and the further they drift, the lower the memory bandwidth; the bytes in flight
# must cover the latency.
_RING_BYTES = {
    32: 48 * 1024,
    64: 64 * 1024,
    128: 96 * 1024,
    256: 128 * 1024,
    512: 192 * 1024,
    1024: 192 * 1024,
}
_WIDEST_RING_BYTES = {128: 80 * 1024}  # of the largest tiles, so that they combine in one pass
_QUERY_BYTES = 2  # per element
_VALUE_BYTES = 4  # per element of a warp's partial output
_COMBINE_PADDING_BYTES = 16  # of CombineBuffer, per partial row
# Min tokens of a fixed split of batch-invariant kernels; fewer than twice as many, unless the
# sequence has the max number of splits. Shorter ones store more partials, and longer ones leave
# more SMs idle where the batch is small.
_SPLIT_TOKENS = 2048
# Max fixed splits of a sequence: the largest power of two whose partials fit in the bytes that
# other kernels need too, so that all calls take a workspace of one size. At a batch of one, CTAs
# beyond its splits are idle.
_MAX_SPLITS = (256, 128, 64, 32, 16)
_MAX_PARTIAL_BYTES = 512 * 1024  # of a CTA
_OTHER_SHARED_BYTES = 1280  # of the other members in kernels/gqa_sm90/shared_memory.cuh

_ROW_PADDING_BYTES = 16  # of an unaligned row and its scale, up to 12 of them before it
_GATHER_WARPS = 2  # producer warps that gather tokens; each scheduler sub-partition has at most one
_TMA_MAPS = parameters("TensorMap: key_map value_map")
# Of a kernel that gathers, in their place.
_KEY_PARAMETERS = parameters(
    """
    const unsigned char*: key_cache
    i64: key_page_stride key_token_stride key_head_stride
    """
)

_RANGE_SLOTS = 2  # partials of a CTA: of the split that its range begins with, and ends with


def _tree_levels(max_splits: int) -> int:
    return max_splits.bit_length() - 1


def _slots_of(tree_levels: int) -> int:
    """Return the partials that a CTA has of a tile that begins in its range, and of another."""
    return 3 * tree_levels


@dataclass(frozen=True, kw_only=True)
class GqaSm90Spec(GqaSpec):
    """Everything that determines the cubin of an sm90 GQA decode kernel."""

    family: ClassVar[str] = "gqa_sm90"
    common_parameters: ClassVar[tuple[Parameter, ...]] = (
        *_TMA_MAPS,
        *parameters(
            """
            const u16*: query
            const unsigned char*: value_cache
            const int*: block_tables seq_lens cu_seqlens_q kv_indptr
            const u32*: draft_mask
            const float*: bmm1_scale_tensor bmm2_scale_tensor sinks
            unsigned char*: out
            float*: lse partial_out
            unsigned char*: partial_states
            u32*: semaphores
            i64: query_stride query_head_stride value_page_stride value_token_stride
                value_head_stride
            """
        ),
        *PROBLEM_PARAMETERS,
        *parameters(
            """
            int: tokens m_tiles num_tiles num_cta_groups cta_group_size takes_whole_tiles
                max_tokens
            """
        ),
        *SCALE_PARAMETERS,
    )

    fixed_overhead_blocks: ClassVar[int] = 0  # of a work tile in the schedule, in KV blocks
    row_state_bytes: ClassVar[int] = 8  # per partial row
    consumer_warps: ClassVar[int] = _CONSUMER_WARPS
    threads: ClassVar[int] = (_CONSUMER_WARPS + 4) * 32  # per CTA
    # CTAs that share a work tile count arrivals, but none waits for another; a CTA takes an SM, and
    # proceeds through its range of the KV blocks.
    uses_semaphores: ClassVar[bool] = True
    is_persistent: ClassVar[bool] = True

    block_m: int
    kv_heads_per_cta: int = 1  # KV heads that a CTA processes at a time
    has_unaligned_rows: bool = False  # rows at multiples of 4 bytes, with their scales behind them

    @property
    def uses_tma(self) -> bool:
        """Whether TMA loads the KV tiles; otherwise producer warps gather the tokens."""
        return self.variant.sparse_block != 1

    @property
    def producer_warps(self) -> int:
        """Warps that load KV tiles."""
        return 1 if self.uses_tma else _GATHER_WARPS

    @property
    def unused_parameters(self) -> tuple[Parameter, ...]:
        """Tensor maps, without TMA."""
        return () if self.uses_tma else _TMA_MAPS

    @property
    def added_parameters(self) -> tuple[Parameter, ...]:
        """Parameters of this variant besides the common ones."""
        has_scales = self.scale_row_bytes or self.variant.has_token_scales
        scales = CACHE_SCALE_PARAMETERS if has_scales else ()
        keys = _KEY_PARAMETERS if self.has_unaligned_rows or not self.uses_tma else ()
        return (*super().added_parameters, *scales, *keys)

    @property
    def split_tokens(self) -> int:
        """Tokens of a fixed split of a short sequence; 0 if splits follow the ranges of CTAs."""
        return _SPLIT_TOKENS if self.variant.batch_invariant else 0

    def schedule_units(self, kv_len: int) -> int:
        """Return the units of a work tile in the schedule: KV blocks, or fixed splits of these."""
        kv_blocks = max(1, -(-(kv_len - self.tail_tokens) // self.block_n))
        if not self.split_tokens:
            return kv_blocks
        min_blocks = self.split_tokens // self.block_n
        if self.variant.sparse_block:
            return min(-(-kv_blocks // min_blocks), self.max_splits)
        limit = max(1, kv_blocks // min_blocks)
        return min(1 << (limit.bit_length() - 1), self.max_splits)

    @property
    def tail_tokens(self) -> int:
        """Tokens of a last KV block that does not count in the schedule.

        A list of QSA has up to three tokens behind a whole number of KV blocks; if some lists of a
        batch had one block more for these, ranges of equal length would split most work tiles.
        """
        return 0 if self.uses_tma else _STEP_TOKENS

    @property
    def max_splits(self) -> int:
        """Max fixed splits of a sequence, a power of two."""
        slot = self._partial_bytes
        fits = [n for n in _MAX_SPLITS if _slots_of(_tree_levels(n)) * slot <= _MAX_PARTIAL_BYTES]
        return max(fits, default=min(_MAX_SPLITS))

    @property
    def tree_levels(self) -> int:
        """Levels of the tree that combines fixed splits, below its root."""
        return _tree_levels(self.max_splits)

    @property
    def partial_rows(self) -> int:
        """Rows of partials of a CTA in the workspace."""
        slots = _slots_of(self.tree_levels) if self.split_tokens else _RANGE_SLOTS
        return slots * self.kv_heads_per_cta * self.block_m

    @property
    def _partial_bytes(self) -> int:
        row_bytes = self.head_dim_vo * _VALUE_BYTES + self.row_state_bytes
        return self.kv_heads_per_cta * self.block_m * row_bytes

    @property
    def element(self) -> DType:
        """Element type of the MMA; fp16 represents every quantized one exactly."""
        return DType.FP16 if self.dequants_kv else self.variant.kv_dtype

    @property
    def key_row_bytes(self) -> int:
        """Bytes of the key of a cached token of one KV head."""
        return self.variant.kv_dtype.row_bytes(self.variant.head_dim)

    @property
    def value_row_bytes(self) -> int:
        """Bytes of the value of a cached token of one KV head."""
        return self.variant.kv_dtype.row_bytes(self.head_dim_vo)

    @property
    def scale_row_bytes(self) -> int:
        """Bytes of the scales of a cached token of one KV head; 0 without, or in its rows."""
        if self.has_unaligned_rows:
            return 0
        if self.variant.has_token_scales:
            return TOKEN_SCALE_BYTES
        is_nvfp4 = self.variant.kv_dtype is DType.NVFP4
        return self.variant.head_dim // NVFP4_BLOCK if is_nvfp4 else 0

    @property
    def row_padding(self) -> int:
        """Bytes of a row in shared memory beside its elements."""
        return _ROW_PADDING_BYTES if self.has_unaligned_rows else 0

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys of a cached token of all KV heads of a CTA; values have no more."""
        return self.key_row_bytes * self.kv_heads_per_cta

    @property
    def max_kv_heads_per_cta(self) -> int:
        """Max KV heads per CTA, for calls with a multiple of them.

        More than one only with the smallest tile, which fills a single MMA, and of a dense call:
        KV heads have block indices of their own. Unaligned rows are contiguous enough: a key with
        its value.
        """
        if self.variant.sparse_block or self.has_unaligned_rows:
            return 1
        heads = _MAX_KV_HEADS_PER_CTA if self.block_m == min(BLOCK_MS) else 1
        while heads > 1 and heads * self.key_row_bytes > _TOKEN_BYTES:
            heads //= 2
        return heads

    @property
    def line_bytes(self) -> int:
        """Contiguous bytes of a token in shared memory."""
        return math.gcd(self.key_row_bytes, self.value_row_bytes, _LINE_BYTES)

    @property
    def dim_parts(self) -> int:
        """Warps that take the same tokens, each a part of the output dims."""
        return -(-self.head_dim_vo // _MAX_PART_DIMS)

    @property
    def _part_warps(self) -> int:
        return _CONSUMER_WARPS // self.dim_parts

    @property
    def block_n(self) -> int:
        """KV tokens per CTA and step."""
        is_light = self.block_m * self.variant.head_dim <= _MAX_TWO_STEP_ACCUMULATORS
        has_two_steps = self.dequants_kv and is_light and self.block_m <= _MAX_TWO_STEP_ROWS
        steps = 2 if has_two_steps else 1
        return self._part_warps // self.kv_heads_per_cta * steps * _STEP_TOKENS

    @property
    def box_tokens(self) -> int:
        """Tokens per TMA box, all of one page; gathered, of a KV block."""
        return math.gcd(self.variant.page_size, self.block_n) if self.uses_tma else self.block_n

    @property
    def stages(self) -> int:
        """Pipeline stages: K or V tiles that fit in the ring."""
        return self._max_ring_bytes // (self.block_n * self.token_bytes)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a tile of K or V with its scales, aligned for the swizzle of the next."""
        others = self.row_padding + self.scale_row_bytes * self.kv_heads_per_cta
        size = self.block_n * (self.token_bytes + others)
        alignment = _SWIZZLED_LINES * self.line_bytes
        return -(-size // alignment) * alignment

    @property
    def _max_ring_bytes(self) -> int:
        is_widest = self.block_m * self.head_dim_vo == _MAX_ACCUMULATORS
        known = _RING_BYTES | (_WIDEST_RING_BYTES if is_widest else {})
        return known[min(size for size in known if size >= self.key_row_bytes)]

    @property
    def keeps_query(self) -> bool:
        """Whether Q stays in registers beside the accumulators, not in shared memory."""
        return self.block_m * self.variant.head_dim <= _MAX_REGISTER_QUERY

    @property
    def combine_rows(self) -> int:
        """Rows that the epilogue combines per pass."""
        return self._combine_tile[0]

    @property
    def combine_dims(self) -> int:
        """Output dims of every part that the epilogue combines per pass."""
        return self._combine_tile[1]

    @property
    def _combine_tile(self) -> tuple[int, int]:
        dims = self.head_dim_vo // self.dim_parts
        query_bytes = 0 if self.keeps_query else self.block_m * self.variant.head_dim * _QUERY_BYTES
        capacity = (
            self.shared_bytes - self.stages * self.stage_bytes - query_bytes - _OTHER_SHARED_BYTES
        )
        whole_rows = [(rows, dims) for rows in BLOCK_MS if rows <= self.block_m]
        tiles = dims // (_DIM_TILE * (2 if self.has_unaligned_rows else 1))
        parts = [(min(BLOCK_MS), dims // n) for n in range(2, tiles + 1) if tiles % n == 0]
        other_row_bytes = _COMBINE_PADDING_BYTES + self.row_state_bytes
        return next(
            (rows, dims)
            for rows, dims in (*whole_rows, *parts)
            if rows * (_CONSUMER_WARPS * dims * _VALUE_BYTES + self._part_warps * other_row_bytes)
            <= capacity
        )

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA: the architecture's limit."""
        return self.arch.shared_bytes

    def serves(self, call: CallShape) -> bool:
        """Whether the call uses this tile and these KV heads per CTA of the variant."""
        if call.kv_heads is None:
            return True
        rows = call.heads // call.kv_heads * call.q_len
        is_tile = self.block_m == block_m_for(self.head_dim_vo, rows)
        return is_tile and self.kv_heads_per_cta in (
            1,
            math.gcd(call.kv_heads, self.max_kv_heads_per_cta),
        )


def block_m_for(head_dim_vo: int, rows: int) -> int:
    """Return the BLOCK_M for ``rows`` query rows per sequence and KV head."""
    part_dims = min(head_dim_vo, _MAX_PART_DIMS)
    known = [tile for tile in BLOCK_MS if tile * part_dims <= _MAX_ACCUMULATORS]
    return min((tile for tile in known if rows <= tile), default=known[0])


def gqa_sm90_spec(
    arch: Arch, variant: GqaVariant, rows: int, *, has_unaligned_rows: bool = False
) -> GqaSm90Spec | None:
    """Return the sm90 kernel for ``rows`` query rows per KV head, or None if unsupported.

    Its CTAs process one KV head each.
    """
    head_dim, head_dim_vo = variant.head_dim, variant.head_dim_vo or variant.head_dim
    row_bytes = (variant.kv_dtype.row_bytes(dims) for dims in (head_dim, head_dim_vo))
    is_covered = (
        arch.has_wgmma
        and not variant.has_head_tables
        and variant.kv_dtype in (variant.query_dtype, *QUANTIZED_DTYPES)
        and all(size % _ROW_STEP_BYTES == 0 for size in row_bytes)
        and (head_dim <= _MAX_PART_DIMS or head_dim == head_dim_vo == MAX_HEAD_DIM)
        and (variant.kv_dtype is not DType.NVFP4 or head_dim == head_dim_vo in HEAD_DIMS)
    )
    if not is_covered:
        return None
    spec = GqaSm90Spec(
        arch=arch,
        variant=variant,
        block_m=block_m_for(head_dim_vo, rows),
        has_unaligned_rows=has_unaligned_rows,
    )
    return spec if _loads(spec) else None


def _loads(spec: GqaSm90Spec) -> bool:
    """Return whether the kernel can load the KV tiles: by TMA, or a token at a time."""
    variant = spec.variant
    if spec.has_unaligned_rows and (not variant.has_token_scales or variant.sparse_block):
        return False
    if not spec.uses_tma:
        return not variant.batch_invariant
    if variant.sparse_block:  # an index names the page of a TMA box
        has_boxes = variant.sparse_block == variant.page_size == spec.box_tokens
        return has_boxes and not spec.scale_row_bytes and not variant.separate_page_ids
    return variant.page_size % _MIN_BOX_TOKENS == 0


def with_all_heads(spec: GqaSm90Spec) -> list[GqaSm90Spec]:
    """Return the kernels for every number of KV heads per CTA, including ``spec``."""
    known = range(1, spec.max_kv_heads_per_cta + 1)
    return [
        replace(spec, kv_heads_per_cta=heads)
        for heads in known
        if spec.max_kv_heads_per_cta % heads == 0
    ]
