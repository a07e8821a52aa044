"""An FP8 KV cache whose scales differ by many powers of two between tokens and scale groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tests.problems.mla import MlaProblem

# Factors of the scales of the four groups of 128 dims, for the token at position t. A scale may
# be 2^20 times smaller than another of its sequence before it loses bits itself.
SCALE_STEPS: dict[str, Callable[[int], tuple[float, float, float, float]]] = {
    "as they are": lambda _: (1, 1, 1, 1),
    "large": lambda _: (2.0**100, 2.0**100, 2.0**100, 2.0**100),
    "tiny": lambda _: (2.0**-80, 2.0**-80, 2.0**-80, 2.0**-80),
    "larger from block to block": lambda t: (
        2.0 ** (6 * (t // 64)),
        2.0 ** (6 * (t // 64)),
        2.0 ** (5 * (t // 64)),
        2.0 ** (5 * (t // 64)),
    ),
    "smaller from block to block": lambda t: (
        2.0 ** (-4 * (t // 64)),
        2.0 ** (-2 * (t // 64)),
        1,
        2.0 ** -(t // 64),
    ),
    "other in every group": lambda _: (2.0**5, 1, 2.0**-4, 2.0**-9),
    "larger in one token": lambda t: (2.0 ** (15 * (t == 130)), 1, 2.0 ** (10 * (t == 200)), 1),
    "none at first": lambda t: (float(t >= 70), float(t >= 64), float(t >= 130), 1),
    "negative here and there": lambda t: (1 - 2 * (t % 3 == 0), -1, 1, 1 - 2 * (t % 2)),
}


def with_scale_steps(problem: MlaProblem, steps: str) -> MlaProblem:
    """Return the problem with scales of :data:`SCALE_STEPS`, one query token per sequence.

    The query is zero in the latent part, so that the scores do not change. Tiny outputs are scaled
    up, since tolerances are absolute for small values.
    """
    case = problem.case
    assert case.kv_format == "fp8_ds_mla"
    assert case.q_len == 1
    rank = case.kv_lora_rank
    query, cache = problem.query.clone(), problem.kv_cache.clone()
    query[..., :rank] = 0
    visible = []
    for seq, length in enumerate(case.seq_lens):
        factors = (
            torch.tensor([SCALE_STEPS[steps](t) for t in range(length)]).double().view(length, -1)
        )
        for t in range(length):
            page = int(problem.block_tables[seq, t // case.page_size])
            scales = cache[page, t % case.page_size, rank : rank + 16].view(torch.float32)
            scales *= factors[t].to(scales)
        known = problem.visible[seq]
        values = known.values * factors.repeat_interleave(rank // 4, dim=1)
        query_rope = torch.cat(
            [torch.zeros_like(known.query[:, :rank]), known.query[:, rank:]], dim=1
        )
        visible.append(replace(known, query=query_rope, values=values))
    if steps == "tiny":
        case = replace(case, output_scale=2.0**80)
    return replace(problem, case=case, query=query, kv_cache=cache, visible=visible)
