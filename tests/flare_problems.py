"""Problems of flare_mla_decoding, ragged and padded, and what float64 gives for them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from mlagen.mla.flare import PagedKVCache, flare_mla_decoding
from tests.cases import MlaCase, MlaProblem
from tests.flare_masks import SCALE, Rule
from tests.mla_rows import E4M3, POISON
from tests.reference import Attention, assert_close, attend, output_tolerance, stack


def flare_case(**facts: Any) -> MlaCase:
    """Return a case of requests with different new tokens, all of which are seen by default."""
    sound: dict[str, Any] = {
        "name": "",
        "seq_lens": (40, 5, 100, 7, 0, 65),
        "q_lens": (2, 1, 5, 0, 0, 3),
        "heads": 6,
        "page_size": 16,
        "score_scale": SCALE,
        "is_causal": False,
    }
    return MlaCase(**sound | facts)


RAGGED = flare_case()
ONE_EACH = flare_case(seq_lens=(40, 1, 100, 65), q_lens=(1, 1, 1, 1))
LONG = flare_case(seq_lens=(3000, 5), q_lens=(2, 1))
PACKED = flare_case(kv_format="fp8_per_token", dtype=torch.bfloat16)
FORMATS = {
    "bf16": RAGGED,
    "fp16": replace(RAGGED, dtype=torch.float16),
    "e4m3": replace(RAGGED, dtype=E4M3),
    "packed": PACKED,
}


@dataclass(frozen=True, kw_only=True)
class Padded:
    """A ragged problem in rows of the same number of tokens, the padding of NaN."""

    query: torch.Tensor
    valid: torch.Tensor
    scales: torch.Tensor | None
    is_token: torch.Tensor  # bool [batch, q_len]


def cached_lengths(problem: MlaProblem) -> torch.Tensor:
    """Return the tokens of each request before its new ones."""
    assert problem.cum_seq_lens_q is not None
    return problem.seq_lens - problem.cum_seq_lens_q.diff()


def decode(
    problem: MlaProblem, rule: Rule, *, padded: Padded | None = None, **changes: Any
) -> torch.Tensor:
    """Return the output for a problem under a mask, ragged unless changed."""
    case, rare = problem.case, problem.rare
    batch = len(case.seq_lens)
    cache: dict[str, Any] = {
        "blocks": problem.kv_cache,
        "block_table": problem.block_tables,
        "cache_lengths": cached_lengths(problem),
        "scales": rare.get("kv_scales"),
    }
    cache = {name: changes.pop(name, value) for name, value in cache.items()}
    q_scale = padded.scales if padded is not None else rare.get("query_scales")
    arguments: dict[str, Any] = {
        "q": problem.query,
        "k": PagedKVCache(**cache),
        "mask": rule.mask(batch, case.heads, str(problem.query.device)),
        "valid_length": problem.cum_seq_lens_q,
        "scale": case.score_scale,
        "ragged": True,
        "q_scale": q_scale,
        "per_token_scale_rope_aware": case.kv_format == "fp8_per_token",
    }
    return flare_mla_decoding(**arguments | changes)


def placed(problem: MlaProblem) -> tuple[list[int], list[int], list[int]]:
    """Return the request of each token, which of it the token is, and the length of the request."""
    requests = [r for r, count in enumerate(problem.q_lens) for _ in range(count)]
    indices = [i for count in problem.q_lens for i in range(count)]
    return requests, indices, [problem.case.seq_lens[r] for r in requests]


def expected(problem: MlaProblem, rule: Rule, bias: list[torch.Tensor] | None = None) -> Attention:
    """Return what float64 gives under a mask, or with some numbers added."""
    case = problem.case
    parts = []
    rows = zip(*placed(problem), problem.seen, strict=True)
    for token, (request, index, length, seen) in enumerate(rows):
        position = length - problem.q_lens[request] + index
        own = rule.bias(request, case.heads, position, length) if bias is None else bias[token]
        parts.append(
            attend(
                seen.query,
                seen.keys,
                seen.values,
                score_scale=case.score_scale,
                bias=own,
                rows_round_to=problem.math_dtype if case.kv_format else None,
            )
        )
    return stack(parts)


def check(problem: MlaProblem, rule: Rule, out: torch.Tensor) -> None:
    """Fail unless every element is right under a mask."""
    wanted = expected(problem, rule)
    tolerance = output_tolerance(out.dtype, wanted, problem.math_dtype)
    assert_close(out, wanted.out, tolerance, "out")


def pad(problem: MlaProblem, q_len: int) -> Padded:
    """Return a ragged problem with padding."""
    lens = torch.tensor(problem.q_lens)
    is_token = (torch.arange(q_len) < lens[:, None]).to(problem.query.device)
    stored = problem.query.view(torch.uint8)
    query = stored.new_full((*is_token.shape, *stored.shape[1:]), POISON)
    query[is_token] = stored
    scales = None
    if "query_scales" in problem.rare:
        scales = problem.rare["query_scales"].new_full(is_token.shape, math.nan)
        scales[is_token] = problem.rare["query_scales"]
    return Padded(
        query=query.view(problem.query.dtype),
        valid=lens.to(torch.int32).to(problem.query.device),
        scales=scales,
        is_token=is_token,
    )
