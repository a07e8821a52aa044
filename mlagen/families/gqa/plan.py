"""Kernel choice and launch plan of a grouped-query decode call, on a persistent grid on sm_90a."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from mlagen.families.common.launchers import rounded_up
from mlagen.families.common.problem import LaunchPlan, ProblemShape, tile_q_len_of
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.problem import GqaProblem
from mlagen.runtime.device import arch_of_device, device_facts
from mlagen.runtime.partition import WHOLE_GPU
from mlagen.spec.dtype import DType
from mlagen.spec.gqa.sm90 import GqaSm90Spec, gqa_sm90_spec
from mlagen.spec.gqa.variant import GqaVariant
from mlagen.values import INT32_MAX

_8BIT_DTYPES = (DType.E4M3, DType.E5M2, DType.INT8)

# KV bytes of a token that a CTA group reads together. Contiguous reads of several heads raise the
# memory bandwidth, up to this size.
_MAX_GROUP_TOKEN_BYTES = 1024

# Cost model of num_cta_groups, in microseconds. Fitted to an H200; only the order of the results
# counts.
_BYTES_PER_US = 4_500_000  # of HBM, which 28 SMs saturate
_BYTES_PER_US_OF_SM = 160_000  # of one SM
# The same of an SM that dequantizes the KV cache. Those of int8 and NVFP4 are less by the
# instructions of a byte.
_DEQUANT_BYTES_PER_US_OF_SM = {
    DType.E4M3: 85_000,
    DType.E5M2: 85_000,
    DType.INT8: 60_000,
    DType.NVFP4: 22_000,
}
_GATHER_BYTES_PER_US_OF_SM = 60_000  # of one whose producer warps gather tokens, at most
_COMBINE_US = 1.3  # fixed cost of a combine
_SPLIT_US = 0.1  # cost per split
_UNEVEN_US = 2.0  # of CTAs whose range is neither whole work tiles nor equal splits
_IDLE_LOSS = 0.012  # relative bandwidth loss if any SM is idle
_SHARE_LOSS = 0.3  # relative bandwidth loss per share of idle SMs

# Max share of SMs that stay idle in favor of a larger CTA group, and of CTA groups that do so
# while the others take their last work tile: these keep the memory busy.
_MAX_IDLE = Fraction(1, 25)

# Min work tiles of a range that takes whole ones, rounded up.
_MIN_WHOLE_TILES = 2


@dataclass(frozen=True, kw_only=True)
class GqaSm90Plan(LaunchPlan):
    """Grid and workspace of one call of the sm90 kernel."""

    cta_group_size: int  # CTAs that process KV heads and M tiles of the same tokens together
    num_cta_groups: int
    takes_whole_tiles: bool  # of equal tiles, a range has whole ones
    m_tiles: int  # per KV head of a sequence; 0 if ragged
    num_tiles: int  # work tiles per sequence; per M tile of a KV head if ragged
    total_tiles: int  # of all sequences; an upper bound if ragged, for ascending offsets


def plan_gqa_sm90(spec: GqaSm90Spec, shape: ProblemShape, sm_count: int) -> GqaSm90Plan:
    """Return the plan of a call.

    ``max_kv_len`` affects only the speed: CTAs derive their ranges from the lengths on the device.
    """
    rows = spec.block_m
    m_tiles = -(-shape.q_len * shape.group_size // rows)
    ctas = shape.kv_heads // spec.kv_heads_per_cta * max(m_tiles, 1)
    max_size = max(m_tiles, _MAX_GROUP_TOKEN_BYTES // spec.token_bytes)
    if spec.variant.sparse_block and spec.uses_tma:  # KV heads share no tokens
        max_size = max(m_tiles, 1)
    cta_group_size = _cta_group_size(ctas, max_size, sm_count)
    num_tiles = ctas // cta_group_size
    total_tiles = shape.batch * num_tiles
    if not shape.q_len:
        total_tiles += shape.total_rows // (shape.kv_heads * rows) * num_tiles
    kv_blocks = spec.schedule_units(shape.max_kv_len)
    # A window that begins inside a KV block covers one block more.
    max_cta_groups = (
        min(sm_count // cta_group_size, total_tiles * (kv_blocks + 1)) if shape.total_rows else 0
    )
    is_uniform = shape.q_len > 0  # as far as the host knows; ragged sequences differ in rows
    num_cta_groups = (
        _num_cta_groups(spec, shape, total_tiles, cta_group_size, max_cta_groups)
        if is_uniform
        else max_cta_groups
    )
    num_ctas = num_cta_groups * cta_group_size
    tiles_of_range = -(-total_tiles // num_cta_groups) if num_cta_groups else 0
    return GqaSm90Plan(
        cta_group_size=cta_group_size,
        num_cta_groups=num_cta_groups,
        num_ctas=num_ctas,
        takes_whole_tiles=(
            is_uniform
            and tiles_of_range >= _MIN_WHOLE_TILES
            and tiles_of_range * num_cta_groups * (1 - _MAX_IDLE) <= total_tiles
        ),
        m_tiles=m_tiles,
        num_tiles=num_tiles,
        total_tiles=total_tiles,
        partial_rows_offset=num_ctas * spec.partial_rows * spec.head_dim_vo * 4,
        workspace_bytes=num_ctas * gqa_sm90_bytes_per_cta(spec),
    )


def gqa_sm90_bytes_per_cta(spec: GqaSm90Spec) -> int:
    """Return the workspace of a CTA: partial outputs in fp32, and a RowState per row."""
    return spec.partial_rows * (spec.head_dim_vo * 4 + spec.row_state_bytes)


def choose_kv_heads_per_cta(spec: GqaSm90Spec, shape: ProblemShape, sm_count: int) -> int:
    """Return the number of KV heads per CTA.

    The maximum, if nearly every SM still gets a whole work tile: the memory bandwidth is higher,
    and there are fewer epilogues. Otherwise one, since larger work tiles need more splits. In a
    batch-invariant call, whose bits depend on it, by the cache alone: over e4m3, 64 query over
    eight KV heads, H200, one is 11 % faster for 1 x 131072 and 2 % slower for 256 x 1024.
    """
    heads = math.gcd(shape.kv_heads, spec.max_kv_heads_per_cta)
    if spec.variant.batch_invariant:
        return 1 if spec.variant.kv_dtype in _8BIT_DTYPES else heads
    plan = plan_gqa_sm90(replace(spec, kv_heads_per_cta=heads), shape, sm_count)
    min_tiles = sm_count // plan.cta_group_size * (1 - _MAX_IDLE)
    return heads if shape.batch * plan.num_tiles >= min_tiles else 1


def fits_in_int32(spec: GqaSm90Spec, plan: GqaSm90Plan, max_tokens: int) -> bool:
    """Return whether linear block indices fit in 32 bits, for up to ``max_tokens`` a sequence."""
    return plan.total_tiles * spec.schedule_units(max_tokens) <= INT32_MAX


def _num_cta_groups(
    spec: GqaSm90Spec,
    shape: ProblemShape,
    num_tiles: int,
    cta_group_size: int,
    max_cta_groups: int,
) -> int:
    """Return the number of CTA groups with the lowest modeled time, all sequences at max length.

    Equal splits of a work tile, or whole work tiles per group, need fewer prologues and combines;
    and combining many splits may take longer than reading the tokens.
    """
    if max_cta_groups == 0:
        return 0
    even = [num_tiles * splits for splits in range(1, max_cta_groups // num_tiles + 1)]
    if not even:
        even = [
            max(
                num_cta_groups
                for num_cta_groups in range(1, max_cta_groups + 1)
                if num_tiles % num_cta_groups == 0
            )
        ]
    row_bytes = spec.key_row_bytes + spec.value_row_bytes
    units = spec.schedule_units(shape.max_kv_len)
    unit_tokens = -(-shape.max_kv_len // units) if spec.split_tokens else spec.block_n
    unit_bytes = unit_tokens * spec.kv_heads_per_cta * row_bytes
    rate_of_sm = _DEQUANT_BYTES_PER_US_OF_SM.get(spec.variant.kv_dtype.element, _BYTES_PER_US_OF_SM)

    if not spec.uses_tma:
        rate_of_sm = min(rate_of_sm, _GATHER_BYTES_PER_US_OF_SM)

    def microseconds(num_cta_groups: int) -> float:
        idle = 1 - num_cta_groups / max_cta_groups
        loss = _SHARE_LOSS * idle + (_IDLE_LOSS if idle else 0.0)
        num_ctas = num_cta_groups * cta_group_size
        rate = min(_BYTES_PER_US * (1 - loss), rate_of_sm * num_ctas)
        is_even = num_cta_groups in even
        splits = -(-num_cta_groups // num_tiles) + (0 if is_even else 1)
        combine = _COMBINE_US + _SPLIT_US * splits if splits > 1 else 0.0
        reading = -(-num_tiles * units // num_cta_groups) * num_ctas * unit_bytes / rate
        return reading + combine + (0.0 if is_even else _UNEVEN_US)

    return min(
        (*even, max_cta_groups),
        key=lambda num_cta_groups: (microseconds(num_cta_groups), -num_cta_groups),
    )


def _cta_group_size(ctas: int, max_size: int, sm_count: int) -> int:
    """Return the largest divisor of ``ctas`` up to ``max_size`` that keeps few SMs idle."""
    limit = min(ctas, max_size, sm_count)
    sizes = [size for size in range(1, limit + 1) if ctas % size == 0]
    return max(size for size in sizes if sm_count % size <= sm_count * _MAX_IDLE)


def shape_of(args: GqaArgs, problem: GqaProblem) -> ProblemShape:
    """Return what the plan of a call depends on."""
    # The window of the arguments: that of a problem depends on the width of its table.
    sparse_tokens = problem.num_indices * problem.variant.sparse_block
    max_seq_len = sparse_tokens or args.max_seq_len
    max_kv_len = sparse_tokens or attended_tokens(max_seq_len, args.window, problem.max_q_len)
    shape = ProblemShape(
        batch=problem.batch,
        q_len=problem.q_len,
        tile_q_len=tile_q_len_of(problem, problem.max_q_len),
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        total_rows=problem.tokens * problem.heads,
        max_kv_len=max_kv_len,
        is_windowed=not sparse_tokens and max_kv_len < rounded_up(max_seq_len),
    )
    return shape.per_token() if sparse_tokens else shape


def attended_tokens(max_seq_len: int, window: int, max_q_len: int) -> int:
    """Return an upper bound of the tokens that the query tokens of a request attend to."""
    rounded = rounded_up(max_seq_len)
    return min(rounded, window + max_q_len) if window else rounded


@lru_cache(maxsize=4096)
def plan_gqa_sm90_call(
    device: int,
    variant: GqaVariant,
    shape: ProblemShape,
    *,
    has_one_head: bool = False,
    has_unaligned_rows: bool = False,
    sms: int = WHOLE_GPU,
) -> tuple[GqaSm90Spec, GqaSm90Plan] | None:
    """Return the sm90 kernel and its plan for a call on GPU ``device``; None if unsupported.

    The plan chooses the KV heads of a CTA, or takes one if ``has_one_head``; ``sms`` is the
    number of SMs of the context.
    """
    arch = arch_of_device(device)
    spec = gqa_sm90_spec(arch, variant, shape.rows, has_unaligned_rows=has_unaligned_rows)
    if spec is None:
        return None
    sm_count = sms or device_facts(device).sm_count
    if not has_one_head:
        spec = replace(spec, kv_heads_per_cta=choose_kv_heads_per_cta(spec, shape, sm_count))
    return spec, plan_gqa_sm90(spec, shape, sm_count)
