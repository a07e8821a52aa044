"""Which kernel serves a grouped-query decode call, and how it is spread over its GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from mlagen.api.calls import rounded_up
from mlagen.api.gqa_inputs import GqaInputs
from mlagen.api.gqa_request import GqaRequest
from mlagen.runtime.device import arch_of_device, device_facts
from mlagen.runtime.plan import DecodePlan, GqaDecodeProblem, plan_gqa_decode
from mlagen.runtime.plan_gqa_hopper import GqaHopperPlan, heads_of_block, plan_gqa_hopper
from mlagen.spec.gqa import GqaDecodeSpec, GqaVariant, gqa_decode_spec
from mlagen.spec.gqa_hopper import GqaHopperSpec, gqa_hopper_spec


def planned_facts(inputs: GqaInputs, request: GqaRequest, device: int) -> dict[str, Any]:
    """Return what either plan of a call depends on."""
    return {
        "device": device,
        "variant": request.variant,
        "batch": request.batch,
        "q_len": request.q_len,
        "is_ragged": request.is_ragged,
        "tokens": request.tokens,
        "heads": request.heads,
        "kv_heads": request.kv_heads,
        "window": int(inputs.window),
        "longest_kv": int(inputs.max_seq_len),
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
    longest_kv: int,
) -> tuple[GqaDecodeSpec, DecodePlan]:
    """Return the portable kernel and its plan of a call on GPU ``device``.

    ``q_len`` is the longest where requests differ, and ``window`` 0 where there is none.
    """
    spec = gqa_decode_spec(arch_of_device(device), variant, q_len * (heads // kv_heads))
    problem = _problem(batch, q_len, is_ragged, tokens, heads, kv_heads, window, longest_kv)
    return spec, plan_gqa_decode(spec, problem, device_facts(device).sm_count)


@lru_cache(maxsize=4096)
def plan_gqa_hopper_call(
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
    longest_kv: int,
    has_one_head: bool = False,
) -> tuple[GqaHopperSpec, GqaHopperPlan] | None:
    """Return the Hopper kernel and its plan of a call on GPU ``device``; None if there is none.

    Blocks take as many kv heads as is best, or one if ``has_one_head``.
    """
    spec = gqa_hopper_spec(arch_of_device(device), variant, q_len * (heads // kv_heads))
    if spec is None:
        return None
    problem = _problem(batch, q_len, is_ragged, tokens, heads, kv_heads, window, longest_kv)
    sm_count = device_facts(device).sm_count
    if not has_one_head:
        spec = replace(spec, block_heads=heads_of_block(spec, problem, sm_count))
    return spec, plan_gqa_hopper(spec, problem, sm_count)


def _problem(
    batch: int,
    q_len: int,
    is_ragged: bool,
    tokens: int,
    heads: int,
    kv_heads: int,
    window: int,
    longest_kv: int,
) -> GqaDecodeProblem:
    longest_kv = rounded_up(longest_kv)
    return GqaDecodeProblem(
        batch=batch,
        q_len=0 if is_ragged else q_len,
        heads=heads,
        kv_heads=kv_heads,
        total_rows=tokens * heads,
        longest_kv=min(longest_kv, window + q_len) if window else longest_kv,
    )
