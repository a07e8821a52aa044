"""Which kernel serves an MLA decode call, and how the call is spread over its GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from mlagen.api.calls import rounded_up
from mlagen.api.mla_inputs import MlaInputs
from mlagen.api.mla_request import MlaRequest
from mlagen.runtime.counters import new_plan
from mlagen.runtime.device import arch_of_device, device_facts
from mlagen.runtime.partition import WHOLE_GPU
from mlagen.runtime.plan import DecodePlan, MlaDecodeProblem, plan_mla_decode
from mlagen.runtime.plan_hopper import HopperPlan, plan_mla_hopper, rows_of_tile
from mlagen.spec.mla import MlaDecodeSpec, mla_decode_spec
from mlagen.spec.mla_hopper import MlaHopperSpec
from mlagen.spec.mla_hopper_calls import mla_hopper_kernel
from mlagen.spec.mla_support import MlaVariant


@lru_cache(maxsize=4096)
def plan_call(
    *,
    device: int,
    variant: MlaVariant,
    batch: int,
    q_len: int,
    tile_q_len: int,
    tokens: int,
    heads: int,
    longest_kv: int,
) -> tuple[MlaDecodeSpec, DecodePlan]:
    """Return the portable kernel and its plan of a call on GPU ``device``.

    ``longest_kv`` is the most that a query token may look at: ``max_seq_len``, or ``top_k``.
    """
    if variant.lookup == "sparse":  # every query token has tokens of its own
        batch, q_len, tile_q_len = tokens, 1, 1
    spec = mla_decode_spec(arch_of_device(device), variant, tile_q_len * heads)
    problem = MlaDecodeProblem(
        batch=batch,
        q_len=q_len,
        heads=heads,
        total_rows=tokens * heads,
        longest_kv=rounded_up(longest_kv),
    )
    return spec, plan_mla_decode(spec, problem, device_facts(device).sm_count)


@lru_cache(maxsize=4096)
def plan_hopper_call(
    *,
    device: int,
    variant: MlaVariant,
    batch: int,
    q_len: int,
    tile_q_len: int,
    tokens: int,
    heads: int,
    longest_kv: int,
    probabilities: str,
    sms: int = WHOLE_GPU,
) -> tuple[MlaHopperSpec, HopperPlan] | None:
    """Return the Hopper kernel and its plan of a call on GPU ``device``; None if there is none.

    ``longest_kv`` as for :func:`plan_call`; ``probabilities`` is what the settings ask for, and
    ``sms`` how many of the GPU's the context has.
    """
    if variant.lookup == "sparse":
        batch, q_len, tile_q_len = tokens, 1, 1
    spec = mla_hopper_kernel(arch_of_device(device), variant, tile_q_len * heads, probabilities)
    if spec is None:
        return None
    problem = MlaDecodeProblem(
        batch=batch,
        q_len=q_len,
        heads=heads,
        total_rows=tokens * heads,
        longest_kv=rounded_up(longest_kv),
    )
    sm_count = sms or device_facts(device).sm_count
    spec = replace(spec, tile_rows=rows_of_tile(spec, problem, tile_q_len, sm_count))
    return spec, plan_mla_hopper(spec, problem, tile_q_len, sm_count)


def number_of_plan(inputs: MlaInputs, request: MlaRequest, spec: MlaHopperSpec) -> int:
    """Return the number by which blocks of later launches know what they begin with.

    Zero if lengths are not all that it depends on, or if they are too many to be kept.
    """
    depends_on_more = inputs.cum_seq_lens_q is not None or inputs.table_starts is not None
    if depends_on_more and not request.top_k:
        return 0
    requests = request.tokens if request.top_k else request.batch
    return new_plan() if requests <= min(spec.threads, spec.kept_lengths) else 0
