"""Kernel choice and launch plan of an MLA decode call."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from mlagen.families.common.launchers import rounded_up
from mlagen.families.common.plan_sm80 import Sm80Plan, plan_mla_sm80
from mlagen.families.common.problem import ProblemShape
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.plan_sm90 import MlaSm90Plan, choose_block_m, plan_mla_sm90
from mlagen.families.mla.problem import MlaProblem
from mlagen.runtime.device import arch_of_device, device_facts
from mlagen.runtime.partition import WHOLE_GPU
from mlagen.runtime.semaphores import new_schedule_id
from mlagen.spec.mla.sm80 import MlaSm80Spec, mla_sm80_spec
from mlagen.spec.mla.sm90 import MlaSm90Spec
from mlagen.spec.mla.sm90_calls import mla_sm90_kernel
from mlagen.spec.mla.variant import MlaVariant


def shape_of(args: MlaArgs, problem: MlaProblem) -> ProblemShape:
    """Return what the plan of a call depends on."""
    shape = ProblemShape(
        batch=problem.batch,
        q_len=problem.q_len,
        tile_q_len=problem.tile_q_len,
        heads=problem.heads,
        total_rows=problem.tokens * problem.heads,
        max_kv_len=rounded_up(problem.top_k or args.max_seq_len),
    )
    return shape.per_token() if problem.top_k else shape


@lru_cache(maxsize=4096)
def plan_mla_sm80_call(
    device: int, variant: MlaVariant, shape: ProblemShape, *, sms: int = WHOLE_GPU
) -> tuple[MlaSm80Spec, Sm80Plan]:
    """Return the sm80 kernel and its plan for a call on GPU ``device``.

    ``sms`` is the number of SMs of the context.
    """
    spec = mla_sm80_spec(arch_of_device(device), variant, shape.rows)
    return spec, plan_mla_sm80(spec, shape, sms or device_facts(device).sm_count)


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

    ``p_dtype_choice`` is the dtype of P that the settings request; ``sms`` is as for
    :func:`plan_mla_sm80_call`.
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
