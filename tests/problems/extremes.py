"""Numbers at the limits: sinks, codes and scales of an FP8 KV cache, uneven scales, wide rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tests.problems.mla import MlaProblem
from tests.problems.problem import E4M3

_E4M3_TOLERANCE = 2**-4  # of outputs and LSE of about 1
# Sinks of 16 heads. Times log2(e), the first six overflow float32.
_SINKS = (
    *(3.4028235e38, -3.4028235e38, 3e38, -3e38, 2.4e38, -2.4e38),
    *(2.3e38, -2.3e38, 1e30, -1e30, 200.0, -200.0, 0.0, math.inf, -math.inf, math.nan),
)

_RANK = 512
_SCALES = slice(_RANK, _RANK + 16)  # bytes of a row
_CODES = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
_FLT_MIN = 2.0**-126

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


def extreme_sinks(device: str) -> torch.Tensor:
    """Return sinks at and around the limits of float32, one per head of 16."""
    return torch.tensor(_SINKS, device=device)


def listed(problem: MlaProblem, top_k: int, *, with_lens: bool = False) -> MlaProblem:
    """Return the problem with top-k indices of whole sequences of one query token, then -1."""
    case, lens = problem.case, problem.case.seq_lens
    indices = torch.full((len(lens), 1, top_k), -1, dtype=torch.int32)
    for seq, length in enumerate(lens):
        positions = torch.arange(length)
        pages = problem.block_tables[seq].cpu()[positions // case.page_size]
        indices[seq, 0, :length] = pages * case.page_size + positions % case.page_size
    return replace(
        problem,
        case=replace(case, top_k=top_k, with_top_k_lens=with_lens),
        block_tables=indices.to(problem.device),
        top_k_lens=problem.seq_lens.clone() if with_lens else None,
    )


def widened(problem: MlaProblem, width: int) -> MlaProblem:
    """Return the problem with rows of ``width`` bytes, of which those without a meaning are NaN.

    Its case has the cache layout ``strided``, in which 128 bytes of NaN are behind every row.
    """
    cache = problem.kv_cache
    assert problem.case.cache_layout == "strided"
    assert width <= cache.stride(1)
    rows = cache.as_strided((*cache.shape[:2], width), cache.stride())
    return replace(problem, kv_cache=rows)


def with_extreme_numbers(problem: MlaProblem) -> MlaProblem:
    """Return the problem with every finite e4m3 code, and KV scales from FLT_MIN to 100.

    The cache changes in place; a 16-bit query keeps its numbers. Each sequence has one query token,
    and its scores are at most 8.
    """
    generator = torch.Generator().manual_seed(1)
    case, query = problem.case, problem.query.clone()
    visible = []
    for seq, length in enumerate(case.seq_lens):
        known = problem.visible[seq]
        row = known.query
        if query.dtype is E4M3:
            codes = _codes(tuple(row.shape), generator)
            query[seq, 0] = codes.view(E4M3)
            row = codes.view(E4M3).double()
        codes = _codes((length, _RANK), generator)
        exponents = torch.rand(length, 4, generator=generator) * 132 - 126
        scales = exponents.exp2().clamp(_FLT_MIN, 100.0)
        scales[::3, 0], scales[1::3, 1] = _FLT_MIN, 100.0
        for position in range(length):
            stored = problem.kv_cache[problem.slot(seq, position)]
            stored[:_RANK] = codes[position]
            stored[_SCALES] = scales[position].view(torch.uint8)
        values = codes.view(E4M3).double() * scales.double().repeat_interleave(128, dim=1)
        keys = torch.cat([values, known.keys[:, _RANK:]], dim=1)
        visible.append(replace(known, query=row, keys=keys, values=values))
    largest = max(float((one.query @ one.keys.T).abs().max()) for one in visible)
    # In fp16 a scale is lost below 2^-25 of 64, that of 100: an error of less than 2^-20 if scaled.
    case = replace(case, score_scale=8 / largest, output_scale=2.0**-5)
    return replace(problem, case=case, query=query, visible=visible)


def _codes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return _CODES[torch.randint(0, len(_CODES), shape, generator=generator)]


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


def latent_part(problem: MlaProblem) -> dict[str, Any]:
    """Return the arguments that leave the rope part of a problem out: views of its tensors."""
    rank = problem.case.kv_lora_rank
    query, kv_cache = problem.query[..., :rank], problem.kv_cache[..., :rank]
    return {"query": query, "kv_cache": kv_cache, "qk_rope_head_dim": 0}


def assert_zero_rope_changes_nothing(
    kind: str, result: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, ...]
) -> None:
    """Fail unless output and LSE are those of the zero rope part: of 16 bits, in every bit."""
    for ours, theirs in zip(result, expected, strict=True):
        atol = _E4M3_TOLERANCE if kind == "e4m3" else 0.0
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=atol)
