"""Kernel choice and launch plan of an MLA decode call, on a persistent grid on sm_90a."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from mlagen.families.common.launchers import rounded_up
from mlagen.families.common.plan_sm80 import is_small
from mlagen.families.common.problem import LaunchPlan, ProblemShape, tile_q_len_of
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.problem import MlaProblem
from mlagen.runtime.device import arch_of_device, device_facts
from mlagen.runtime.partition import WHOLE_GPU
from mlagen.runtime.semaphores import new_schedule_id
from mlagen.spec.mla.sm90 import MlaSm90Spec, mla_sm90_kernel
from mlagen.spec.mla.variant import MlaVariant
from mlagen.values import INT32_MAX

_MAX_CTA_GROUP_SIZE = 4

# Max share of SMs that stay idle in favor of a larger CTA group, whose M tiles read the KV of a
# sequence once.
_MAX_IDLE = Fraction(1, 25)

# No plan needs a larger workspace.
MAX_BYTES_PER_SM = 513 << 10


@dataclass(frozen=True, kw_only=True)
class MlaSm90Plan(LaunchPlan):
    """Grid and workspace of one call of an sm90 kernel."""

    cta_group_size: int  # CTAs that process M tiles of one sequence together
    num_cta_groups: int
    total_tiles: int  # work tiles of all sequences; an upper bound if ragged
    max_splits: int  # fixed splits of a sequence, at most; 0 without them
    num_slots: int  # of them in the workspace, each for all CTAs of a group
    is_small: bool  # the sm80 kernel is faster


def choose_block_m(spec: MlaSm90Spec, shape: ProblemShape, sm_count: int) -> int:
    """Return the fastest BLOCK_M for a call; ``spec`` has the default one.

    Smaller tiles read the same tokens more often, but occupy more SMs.
    """
    if spec.variant.batch_invariant:
        return spec.block_m
    # Of one M tile per sequence.
    kv_blocks = shape.batch * _kv_blocks_of(spec, shape.max_kv_len)
    for rows, kv_blocks_per_sm in spec.smaller_tiles:
        tiles = -(-shape.rows // rows)
        is_little = tiles * kv_blocks <= kv_blocks_per_sm * sm_count
        if spec.needs_one_wave:
            is_little &= tiles * shape.batch <= sm_count
        if rows < spec.block_m and is_little:
            return rows
    return spec.block_m


def plan_mla_sm90(spec: MlaSm90Spec, shape: ProblemShape, sm_count: int) -> MlaSm90Plan:
    """Return the plan of a call.

    ``max_kv_len`` and ``tile_q_len``, the typical query length, affect only the speed: CTAs derive
    their ranges from the lengths on the device.
    """
    rows = spec.block_m
    tiles = -(-shape.rows // rows)
    cta_group_size = _cta_group_size(tiles, sm_count)
    if shape.q_len:
        total_tiles = shape.batch * -(-tiles // cta_group_size)
    else:
        total_tiles = -(-shape.total_rows // (rows * cta_group_size)) + shape.batch
    kv_blocks = _kv_blocks_of(spec, shape.max_kv_len)
    total_blocks = total_tiles * (kv_blocks + spec.fixed_overhead_blocks)
    num_ranges = total_blocks // spec.min_blocks_per_range
    num_cta_groups = min(sm_count // cta_group_size, max(1, num_ranges)) if shape.total_rows else 0
    num_ctas = num_cta_groups * cta_group_size
    plan = MlaSm90Plan(
        cta_group_size=cta_group_size,
        num_cta_groups=num_cta_groups,
        num_ctas=num_ctas,
        total_tiles=total_tiles,
        max_splits=spec.max_splits_of(tiles) if spec.variant.batch_invariant else 0,
        num_slots=_slots_of_splits(spec, shape, total_tiles),
        partial_rows_offset=num_ctas * _partial_rows(spec) * spec.head_dim_vo * 2,
        workspace_bytes=num_ctas * mla_sm90_bytes_per_cta(spec),
        is_small=is_small_call(spec, shape, sm_count),
    )
    return plan_for_workspace(spec, plan, sm_count * MAX_BYTES_PER_SM)


def plan_for_workspace(spec: MlaSm90Spec, plan: MlaSm90Plan, given: int) -> MlaSm90Plan:
    """Return the plan of a batch-invariant call for a workspace of ``given`` bytes.

    Its splits have as many slots as fit, and as one work tile may have: a launch with more splits
    has phases.
    """
    if not spec.variant.batch_invariant:
        return plan
    slot_rows = plan.cta_group_size * spec.block_m
    slot_bytes = slot_rows * _partial_row_bytes(spec)
    num_slots = min(plan.num_slots, max(given // slot_bytes, plan.max_splits))
    return replace(
        plan,
        num_slots=num_slots,
        partial_rows_offset=num_slots * slot_rows * spec.head_dim_vo * 2,
        workspace_bytes=num_slots * slot_bytes,
    )


def _slots_of_splits(spec: MlaSm90Spec, shape: ProblemShape, total_tiles: int) -> int:
    """Return the slots of all splits of a batch-invariant call, at least those of one work tile.

    A request may be longer than the call says, but not a list. The CTA throttle has another slot.
    """
    if not spec.variant.batch_invariant:
        return 0
    m_tiles = -(-shape.rows // spec.block_m)
    num_splits = spec.splits_of(shape.max_kv_len, m_tiles)
    min_slots = num_splits if spec.is_sparse else spec.max_splits_of(m_tiles)
    return max(total_tiles * num_splits, min_slots) + 1


def is_small_call(spec: MlaSm90Spec, shape: ProblemShape, sm_count: int) -> bool:
    """Whether the sm80 kernel is faster: its prologue is shorter, which dominates few CTAs.

    Never of a batch-invariant call, whose kernel does not depend on the batch.
    """
    if spec.variant.batch_invariant:
        return False
    limit = spec.max_small_blocks(shape.rows, _kv_blocks_of(spec, shape.max_kv_len))
    return is_small(shape, limit, sm_count)


def mla_sm90_bytes_per_cta(spec: MlaSm90Spec) -> int:
    """Return the workspace of a CTA: partial outputs in fp16, and a PartialState per row."""
    return _partial_rows(spec) * _partial_row_bytes(spec)


def _partial_row_bytes(spec: MlaSm90Spec) -> int:
    return spec.head_dim_vo * 2 + spec.partial_state_bytes


def _partial_rows(spec: MlaSm90Spec) -> int:
    return 2 * spec.block_m  # a CTA stores at most two splits


def fits_in_int32(spec: MlaSm90Spec, plan: MlaSm90Plan, max_tokens: int) -> bool:
    """Return whether linear block indices fit in 32 bits, for up to ``max_tokens`` a sequence."""
    # Each fixed split has an overhead, and they are equally long.
    num_splits = plan.max_splits or 1
    blocks_per_tile = _kv_blocks_of(spec, max_tokens) + num_splits * (
        spec.fixed_overhead_blocks + (num_splits > 1)
    )
    return plan.total_tiles * blocks_per_tile <= INT32_MAX


def _kv_blocks_of(spec: MlaSm90Spec, tokens: int) -> int:
    return -(-tokens // spec.block_n)


def _cta_group_size(tiles: int, sm_count: int) -> int:
    """Return the group size with the fewest waves, counting idle ranks and ungrouped CTAs.

    Up to ``_MAX_IDLE`` of ungrouped CTAs do not count. Of equal sizes the larger: CTAs of a group
    read the same tokens.
    """
    max_size = 1 if tiles == 1 else min(_MAX_CTA_GROUP_SIZE, sm_count)

    def waves(size: int) -> Fraction:
        idle = sm_count % size
        busy = sm_count if idle <= _MAX_IDLE * sm_count else sm_count - idle
        return Fraction(-(-tiles // size) * size, busy)

    return min(range(1, max_size + 1), key=lambda size: (waves(size), -size))


def shape_of(args: MlaArgs, problem: MlaProblem) -> ProblemShape:
    """Return what the plan of a call depends on."""
    shape = ProblemShape(
        batch=problem.batch,
        q_len=problem.q_len,
        tile_q_len=tile_q_len_of(problem, problem.tile_q_len),
        heads=problem.heads,
        total_rows=problem.tokens * problem.heads,
        max_kv_len=rounded_up(problem.top_k + problem.extra_top_k or args.max_seq_len),
    )
    return shape.per_token() if problem.top_k else shape


@lru_cache(maxsize=4096)
def plan_mla_sm90_call(
    device: int,
    variant: MlaVariant,
    shape: ProblemShape,
    *,
    p_dtype_choice: str,
    sms: int = WHOLE_GPU,
) -> tuple[MlaSm90Spec, MlaSm90Plan] | None:
    """Return the sm90 kernel and its plan for a call on GPU ``device``; None if unsupported.

    ``p_dtype_choice`` is the dtype of P that the settings request, and ``sms`` the number of SMs of
    the context.
    """
    spec = mla_sm90_kernel(arch_of_device(device), variant, shape.rows, p_dtype_choice)
    if spec is None:
        return None
    sm_count = sms or device_facts(device).sm_count
    spec = replace(spec, block_m=choose_block_m(spec, shape, sm_count))
    return spec, plan_mla_sm90(spec, shape, sm_count)


def schedule_id_of(args: MlaArgs, problem: MlaProblem, spec: MlaSm90Spec) -> int:
    """Return the schedule id under which CTAs cache their scheduler metadata across launches.

    Zero disables the cache: the schedule depends on more than the lengths, or there are too many
    lengths to cache.
    """
    if args.causal_seqlens_kv_global is not None:
        return 0
    has_offsets = args.cum_seq_lens_q is not None or args.kv_indptr is not None
    if has_offsets and not problem.top_k:
        return 0
    requests = problem.tokens if problem.top_k else problem.batch
    return new_schedule_id() if requests <= min(spec.threads, spec.cached_seq_lens) else 0
