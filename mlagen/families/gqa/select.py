"""Kernel choice and launch plan of a grouped-query decode call."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from mlagen.families.common.launchers import rounded_up
from mlagen.families.common.plan_sm80 import GqaProblemShape, Sm80Plan, plan_gqa_sm80
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.plan_sm90 import GqaSm90Plan, choose_heads_per_cta, plan_gqa_sm90
from mlagen.families.gqa.problem import GqaProblem
from mlagen.runtime.device import arch_of_device, device_facts
from mlagen.spec.gqa.sm80 import GqaSm80Spec, GqaVariant, gqa_sm80_spec
from mlagen.spec.gqa.sm90 import GqaSm90Spec, gqa_sm90_spec


def plan_arguments(args: GqaArgs, problem: GqaProblem, device: int) -> dict[str, Any]:
    """Return the arguments of both planning functions for a call."""
    return {
        "device": device,
        "variant": problem.variant,
        "batch": problem.batch,
        "q_len": problem.q_len,
        "is_ragged": problem.is_ragged,
        "tokens": problem.tokens,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "window": int(args.window),
        "max_kv_len": int(args.max_seq_len),
    }


@lru_cache(maxsize=4096)
def plan_gqa_call(
    *,
    device: int,
    variant: GqaVariant,
    batch: int,
    q_len: int,
    is_ragged: bool,
    tokens: int,
    heads: int,
    kv_heads: int,
    window: int,
    max_kv_len: int,
) -> tuple[GqaSm80Spec, Sm80Plan]:
    """Return the sm80 kernel and its plan for a call on GPU ``device``.

    ``q_len`` is the maximum where requests differ; ``window`` is 0 for no limit.
    """
    spec = gqa_sm80_spec(arch_of_device(device), variant, q_len * (heads // kv_heads))
    problem = _problem(batch, q_len, is_ragged, tokens, heads, kv_heads, window, max_kv_len)
    return spec, plan_gqa_sm80(spec, problem, device_facts(device).sm_count)


@lru_cache(maxsize=4096)
def plan_gqa_sm90_call(
    *,
    device: int,
    variant: GqaVariant,
    batch: int,
    q_len: int,
    is_ragged: bool,
    tokens: int,
    heads: int,
    kv_heads: int,
    window: int,
    max_kv_len: int,
    has_one_head: bool = False,
) -> tuple[GqaSm90Spec, GqaSm90Plan] | None:
    """Return the sm90 kernel and its plan for a call on GPU ``device``; None if unsupported.

    The plan chooses the KV heads of a CTA, or takes one if ``has_one_head``.
    """
    spec = gqa_sm90_spec(arch_of_device(device), variant, q_len * (heads // kv_heads))
    if spec is None:
        return None
    problem = _problem(batch, q_len, is_ragged, tokens, heads, kv_heads, window, max_kv_len)
    sm_count = device_facts(device).sm_count
    if not has_one_head:
        spec = replace(spec, heads_per_cta=choose_heads_per_cta(spec, problem, sm_count))
    return spec, plan_gqa_sm90(spec, problem, sm_count)


def _problem(
    batch: int,
    q_len: int,
    is_ragged: bool,
    tokens: int,
    heads: int,
    kv_heads: int,
    window: int,
    max_kv_len: int,
) -> GqaProblemShape:
    max_kv_len = rounded_up(max_kv_len)
    return GqaProblemShape(
        batch=batch,
        q_len=0 if is_ragged else q_len,
        heads=heads,
        kv_heads=kv_heads,
        total_rows=tokens * heads,
        max_kv_len=min(max_kv_len, window + q_len) if window else max_kv_len,
    )
