"""Keywords of decode context parallel (DCP), in TensorRT-LLM's signature."""

from __future__ import annotations

from typing import Any

from mlagen.families.common.arguments import (
    reject,
    require,
    require_dims,
    require_flag,
    require_ints,
    require_tensor,
    require_whole_number,
    shown,
)

_DEFAULTS = {"cp_world": 1, "cp_rank": 0, "causal_seqlens_kv_global": None}


def is_dcp(call: dict[str, Any]) -> bool:
    """Return ``enable_dcp`` of a call, after checking the keywords that depend on it.

    ``call`` has all arguments by name, as the caller passed them.
    """
    world = require_whole_number(call["cp_world"], "cp_world", min_value=1)
    rank = require_whole_number(call["cp_rank"], "cp_rank")
    if not require_flag(call["enable_dcp"], "enable_dcp"):
        for keyword, default in _DEFAULTS.items():
            value = call[keyword]
            if value is not default and (default is None or value != default):
                reject(keyword, f"{default} without enable_dcp", shown(value))
        return False
    require(rank < world, "cp_rank", f"less than {world} (cp_world)", rank)
    if not require_flag(call["return_lse"], "return_lse"):
        reject("return_lse", "True with enable_dcp", "False")
    query, offsets = require_tensor(call["query"], "query"), call["cum_seq_lens_q"]
    require_dims(query, "query", (4,) if offsets is None else (3,))
    batch = query.shape[0]
    if offsets is not None:
        require_dims(require_tensor(offsets, "cum_seq_lens_q"), "cum_seq_lens_q", (1,))
        batch = offsets.shape[0] - 1
    name = "causal_seqlens_kv_global"
    require_ints(call[name], name, query.device, ((batch,),), "requests")
    return True


def dcp_fields(call: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ``MlaArgs`` for decode context parallel; none without it.

    The top-k indices of a sparse call name this rank's tokens, without a causal mask.
    """
    is_sparse = require_whole_number(call["sparse_mla_top_k"], "sparse_mla_top_k") > 0
    if is_sparse or not require_flag(call["enable_dcp"], "enable_dcp"):
        return {}
    return {
        "causal_seqlens_kv_global": call["causal_seqlens_kv_global"],
        "cp_world": require_whole_number(call["cp_world"], "cp_world"),
        "cp_rank": require_whole_number(call["cp_rank"], "cp_rank"),
    }


def lse_base(base: str | None, enable_dcp: object) -> str:
    """Return the base of the LSE; None means FlashInfer's default."""
    if base is not None:
        return base
    return "basee" if require_flag(enable_dcp, "enable_dcp") else "base2"
