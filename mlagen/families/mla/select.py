"""Kernel choice and launch plan of an MLA decode call."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from mlagen.families.common.launchers import rounded_up
from mlagen.families.common.plan_sm80 import MlaProblemShape, Sm80Plan, plan_mla_sm80
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


@lru_cache(maxsize=4096)
def plan_mla_sm80_call(
    *,
    device: int,
    variant: MlaVariant,
    batch: int,
    q_len: int,
    tile_q_len: int,
    tokens: int,
    heads: int,
    max_kv_len: int,
    sms: int = WHOLE_GPU,
) -> tuple[MlaSm80Spec, Sm80Plan]:
    """Return the sm80 kernel and its plan for a call on GPU ``device``.

    ``max_kv_len`` bounds the tokens that a query token attends to: ``max_seq_len``, or ``top_k``.
    ``sms`` is the number of SMs of the context.
    """
    if variant.lookup == "sparse":  # every query token has its own top-k indices
        batch, q_len, tile_q_len = tokens, 1, 1
    spec = mla_sm80_spec(arch_of_device(device), variant, tile_q_len * heads)
    problem = _problem(batch, q_len, tokens, heads, max_kv_len)
    return spec, plan_mla_sm80(spec, problem, sms or device_facts(device).sm_count)


@lru_cache(maxsize=4096)
def plan_mla_sm90_call(
    *,
    device: int,
    variant: MlaVariant,
    batch: int,
    q_len: int,
    tile_q_len: int,
    tokens: int,
    heads: int,
    max_kv_len: int,
    p_dtype_choice: str,
    sms: int = WHOLE_GPU,
) -> tuple[MlaSm90Spec, MlaSm90Plan] | None:
    """Return the sm90 kernel and its plan for a call on GPU ``device``; None if unsupported.

    ``max_kv_len`` and ``sms`` are as for :func:`plan_mla_sm80_call`; ``p_dtype_choice`` is the
    dtype of P that the settings request.
    """
    if variant.lookup == "sparse":
        batch, q_len, tile_q_len = tokens, 1, 1
    spec = mla_sm90_kernel(arch_of_device(device), variant, tile_q_len * heads, p_dtype_choice)
    if spec is None:
        return None
    problem = _problem(batch, q_len, tokens, heads, max_kv_len)
    sm_count = sms or device_facts(device).sm_count
    spec = replace(spec, block_m=choose_block_m(spec, problem, tile_q_len, sm_count))
    return spec, plan_mla_sm90(spec, problem, tile_q_len, sm_count)


def _problem(batch: int, q_len: int, tokens: int, heads: int, max_kv_len: int) -> MlaProblemShape:
    return MlaProblemShape(
        batch=batch,
        q_len=q_len,
        heads=heads,
        total_rows=tokens * heads,
        max_kv_len=rounded_up(max_kv_len),
    )


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
