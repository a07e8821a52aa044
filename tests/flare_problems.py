"""Problems of flare_mla_decoding, ragged and padded, and their float64 results."""

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
    """Return a ragged case, unmasked by default."""
    defaults: dict[str, Any] = {
        "name": "",
        "seq_lens": (40, 5, 100, 7, 0, 65),
        "q_lens": (2, 1, 5, 0, 0, 3),
        "heads": 6,
        "page_size": 16,
        "score_scale": SCALE,
        "is_causal": False,
    }
    return MlaCase(**defaults | facts)


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
    """A ragged problem padded to one query length, with NaN as padding."""

    query: torch.Tensor
    valid: torch.Tensor
    scales: torch.Tensor | None
    is_token: torch.Tensor  # bool [batch, q_len]


def cached_lengths(problem: MlaProblem) -> torch.Tensor:
    """Return the KV length of each sequence before its new tokens."""
    assert problem.cum_seq_lens_q is not None
    return problem.seq_lens - problem.cum_seq_lens_q.diff()


def decode(
    problem: MlaProblem, rule: Rule, *, padded: Padded | None = None, **changes: Any
) -> torch.Tensor:
    """Return the output for a problem under a mask, ragged by default."""
    case, extra_args = problem.case, problem.extra_args
    batch = len(case.seq_lens)
    cache: dict[str, Any] = {
        "blocks": problem.kv_cache,
        "block_table": problem.block_tables,
        "cache_lengths": cached_lengths(problem),
        "scales": extra_args.get("kv_scales"),
    }
    cache = {name: changes.pop(name, value) for name, value in cache.items()}
    q_scale = padded.scales if padded is not None else extra_args.get("query_scales")
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
    """Return the sequence of each token, its index in the sequence, and the sequence's length."""
    seqs = [r for r, count in enumerate(problem.q_lens) for _ in range(count)]
    indices = [i for count in problem.q_lens for i in range(count)]
    return seqs, indices, [problem.case.seq_lens[r] for r in seqs]


def expected(problem: MlaProblem, rule: Rule, bias: list[torch.Tensor] | None = None) -> Attention:
    """Return the float64 result under a mask, or with an added bias."""
    case = problem.case
    parts = []
    rows = zip(*placed(problem), problem.visible, strict=True)
    for token, (seq, index, length, visible) in enumerate(rows):
        position = length - problem.q_lens[seq] + index
        own = rule.bias(seq, case.heads, position, length) if bias is None else bias[token]
        parts.append(
            attend(
                visible.query,
                visible.keys,
                visible.values,
                score_scale=case.score_scale,
                bias=own,
                rows_round_to=problem.math_dtype if case.kv_format else None,
            )
        )
    return stack(parts)


def check(problem: MlaProblem, rule: Rule, out: torch.Tensor) -> None:
    """Fail unless every element is right under the mask."""
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
    if "query_scales" in problem.extra_args:
        scales = problem.extra_args["query_scales"].new_full(is_token.shape, math.nan)
        scales[is_token] = problem.extra_args["query_scales"]
    return Padded(
        query=query.view(problem.query.dtype),
        valid=lens.to(torch.int32).to(problem.query.device),
        scales=scales,
        is_token=is_token,
    )
