"""Kernel choice and launch plan of a grouped-query decode call."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from mlagen.families.common.launchers import rounded_up
from mlagen.families.common.plan_sm80 import Sm80Plan, plan_gqa_sm80
from mlagen.families.common.problem import ProblemShape
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.plan_sm90 import GqaSm90Plan, choose_kv_heads_per_cta, plan_gqa_sm90
from mlagen.families.gqa.problem import GqaProblem
from mlagen.runtime.device import arch_of_device, device_facts
from mlagen.runtime.partition import WHOLE_GPU
from mlagen.spec.gqa.sm80 import GqaSm80Spec, gqa_sm80_spec
from mlagen.spec.gqa.sm90 import GqaSm90Spec, gqa_sm90_spec
from mlagen.spec.gqa.variant import GqaVariant


def shape_of(args: GqaArgs, problem: GqaProblem) -> ProblemShape:
    """Return what the plan of a call depends on."""
    return ProblemShape(
        batch=problem.batch,
        q_len=problem.q_len,
        tile_q_len=problem.max_q_len,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        total_rows=problem.tokens * problem.heads,
        # The window of the arguments: that of a problem depends on the width of its table.
        max_kv_len=attended_tokens(args.max_seq_len, args.window, problem.max_q_len),
    )


def attended_tokens(max_seq_len: int, window: int, max_q_len: int) -> int:
    """Return an upper bound of the tokens that the query tokens of a request attend to."""
    rounded = rounded_up(max_seq_len)
    return min(rounded, window + max_q_len) if window else rounded


@lru_cache(maxsize=4096)
def plan_gqa_sm80_call(
    device: int, variant: GqaVariant, shape: ProblemShape, *, sms: int = WHOLE_GPU
) -> tuple[GqaSm80Spec, Sm80Plan]:
    """Return the sm80 kernel and its plan for a call on GPU ``device``.

    ``sms`` is the number of SMs of the context.
    """
    spec = gqa_sm80_spec(arch_of_device(device), variant, shape.rows)
    return spec, plan_gqa_sm80(spec, shape, sms or device_facts(device).sm_count)


@lru_cache(maxsize=4096)
def plan_gqa_sm90_call(
    device: int,
    variant: GqaVariant,
    shape: ProblemShape,
    *,
    has_one_head: bool = False,
    sms: int = WHOLE_GPU,
) -> tuple[GqaSm90Spec, GqaSm90Plan] | None:
    """Return the sm90 kernel and its plan for a call on GPU ``device``; None if unsupported.

    The plan chooses the KV heads of a CTA, or takes one if ``has_one_head``; ``sms`` is as for
    :func:`plan_gqa_sm80_call`.
    """
    spec = gqa_sm90_spec(arch_of_device(device), variant, shape.rows)
    if spec is None:
        return None
    sm_count = sms or device_facts(device).sm_count
    if not has_one_head:
        spec = replace(spec, kv_heads_per_cta=choose_kv_heads_per_cta(spec, shape, sm_count))
    return spec, plan_gqa_sm90(spec, shape, sm_count)
