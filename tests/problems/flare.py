"""Problems of flare_mla_decoding, over a paged cache or dense keys, ragged or padded."""

from __future__ import annotations

import math
from typing import Any

import torch

from mlagen.mla import PagedKVCache, flare_mla_decoding
from tests.problems.batch_mla import ragged
from tests.problems.masks import MASKS
from tests.problems.mla import MlaCase, MlaProblem
from tests.problems.problem import POISON

SCALE = 0.07

_RAGGED = {"seq_lens": (40, 5, 100, 7, 0, 65), "q_lens": (2, 1, 5, 0, 0, 3)}
_DENSE = {"seq_lens": (33, 33, 33), "q_lens": (2, 0, 3), "page_size": 33, "spare_pages": 0}

# Facts of a case, and how it is passed.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ragged": (_RAGGED, {}),
    "split": ({"seq_lens": (3000, 5), "q_lens": (2, 1)}, {}),
    "padded": (_RAGGED, {"pad_to": 6}),
    "one token each": ({"seq_lens": (40, 1, 100, 65), "q_lens": (1, 1, 0, 1)}, {"pad_to": 1}),
    "dense": (_DENSE, {"is_dense": True}),
    "dense, padded": (_DENSE, {"is_dense": True, "pad_to": 3}),
    "dense, one token each": (_DENSE | {"q_lens": (1, 1, 1)}, {"is_dense": True, "pad_to": 1}),
    "dense, three tokens each": (_DENSE | {"q_lens": (3, 3, 3)}, {"is_dense": True, "pad_to": 3}),
}


def flare_case(**facts: Any) -> MlaCase:
    """Return a case of ``flare_mla_decoding``, of six ragged sequences by default."""
    usual: dict[str, Any] = {"heads": 6, "page_size": 16, "is_causal": False, "mask": "all"}
    usual["score_scale"] = SCALE
    return MlaCase(**usual | (ragged(facts) if "seq_lens" in facts else _RAGGED | facts))


def cached_lengths(problem: MlaProblem) -> torch.Tensor:
    """Return the KV length of each sequence before its new tokens."""
    assert problem.cum_seq_lens_q is not None
    return (problem.seq_lens - problem.cum_seq_lens_q.diff()).clamp(min=0)


def flare_arguments(problem: MlaProblem) -> dict[str, Any]:
    """Return the arguments of ``flare_mla_decoding``, and the parts of its cache."""
    case, extra = problem.case, problem.extra_args
    return {
        "q": problem.query,
        "blocks": problem.kv_cache,
        "block_table": problem.block_tables,
        "cache_lengths": cached_lengths(problem),
        "scales": extra.get("kv_scales"),
        "mask": MASKS[case.mask].mask(len(case.seq_lens), case.heads, str(problem.device)),
        "valid_length": problem.cum_seq_lens_q,
        "scale": case.score_scale,
        "ragged": True,
        "q_scale": extra.get("query_scales"),
        "per_token_scale_rope_aware": case.kv_format == "fp8_per_token",
    }


def decode_flare(
    *, pad_to: int | None = None, is_dense: bool = False, **arguments: Any
) -> torch.Tensor:
    """Return the output of each query token; with ``pad_to`` each sequence has so many rows."""
    names = ("blocks", "block_table", "cache_lengths", "scales")
    cache = {name: arguments.pop(name) for name in names}
    if is_dense:
        arguments |= dense_keys(cache)
    else:
        arguments["k"] = PagedKVCache(**cache)
    if pad_to is None:
        return flare_mla_decoding(**arguments)
    lens = arguments["valid_length"].diff()
    is_token = torch.arange(pad_to, device=lens.device) < lens[:, None]
    stored = arguments["q"].view(torch.uint8)
    query = stored.new_full((*is_token.shape, *stored.shape[1:]), POISON)
    query[is_token] = stored
    arguments["q"] = query.view(arguments["q"].dtype)
    if (scales := arguments["q_scale"]) is not None:
        arguments["q_scale"] = scales.new_full(is_token.shape, math.nan)
        arguments["q_scale"][is_token] = scales
    has_padding = not is_dense or not bool(is_token.all())
    arguments |= {"ragged": False, "valid_length": lens.int() if has_padding else None}
    out = flare_mla_decoding(**arguments)
    assert tuple(out.shape) == (*query.shape[:-1], 512)
    assert (out[~is_token] == 0).all()
    return out[is_token]


def decode(problem: MlaProblem, **changes: Any) -> torch.Tensor:
    """Return the output of each query token of a problem, with some arguments replaced."""
    return decode_flare(**flare_arguments(problem) | changes)


def dense_keys(cache: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    """Return keys with spare rows of NaN, from sequences of one page each."""
    pages, scales = cache["block_table"][:, 0].long(), cache["scales"]
    keys = cache["blocks"].view(torch.uint8)[pages].unsqueeze(2)
    wide = keys.new_full((len(pages), keys.shape[1] + 7, *keys.shape[2:]), POISON)
    wide[:, :-7] = keys
    k = wide.view(cache["blocks"].dtype)[:, :-7]
    return {"k": k, "kv_scales": scales[pages] if scales is not None else None}
