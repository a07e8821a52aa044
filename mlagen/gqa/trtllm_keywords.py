"""Rare keywords of TensorRT-LLM's signature of grouped-query decode."""

from __future__ import annotations

import math
from typing import Any

import torch

from mlagen.errors import UnsupportedError
from mlagen.families.common.arguments import (
    check_unread_buffer,
    reject,
    reject_dtype,
    reject_unserved,
    require_choice,
    require_flag,
    require_number,
    require_scale,
    require_tensor,
    require_whole_number,
    shown,
)
from mlagen.families.common.memory import require_memory
from mlagen.families.gqa.args import GqaArgNames

NAMES = GqaArgNames(cum_seq_lens_q="cum_seq_lens_q")
RAGGED_NAMES = NAMES._replace(q_len="max_q_len")

_BACKENDS = ("auto", "xqa", "trtllm-gen", "cake")
_TRANSFORM_MODES = ("k_only", "separate_kv")
_NVFP4 = "nvfp4"

# Keywords that no kernel implements, with the value that asks for nothing.
_NOTHING: dict[str, Any] = {
    "o_sf_scale": None,
    "o_sf_vec_size": None,
    "uses_shared_paged_kv_idx": True,
    "enable_block_sparse_attention": False,
    "cp_world": 1,
    "cp_rank": 0,
    "causal_seqlens_kv_global": None,
    "sparse_top_k": 0,
}


def reject_unserved_keywords(**given: object) -> None:
    """Reject keywords that request what no kernel implements, and those of a wrong type."""
    for keyword, nothing in _NOTHING.items():
        value = given[keyword]
        if isinstance(nothing, bool):
            value = require_flag(value, keyword)
        elif nothing is not None:
            value = require_whole_number(value, keyword)
        reject_unserved(keyword, value, nothing)


def check_ignored_keywords(
    backend: object,
    threshold: object,
    transform_mode: object,
    length_aware_schedule: object,
    **unread_buffers: object,
) -> None:
    """Reject keywords of a wrong type that change no result."""
    require_choice(backend, "backend", _BACKENDS)
    if threshold is not None:
        require_number(threshold, "skip_softmax_threshold_scale_factor")
    if transform_mode is not None:
        require_choice(transform_mode, "bf16q_fp8kv_transform_mode", _TRANSFORM_MODES)
    require_flag(length_aware_schedule, "length_aware_schedule")
    query = unread_buffers.pop("query")
    for name, buffer in unread_buffers.items():
        check_unread_buffer(name, buffer, query)


def output_dtype(query: torch.Tensor, out: torch.Tensor | None, out_dtype: object) -> torch.dtype:
    """Return the dtype of the output, by default that of the query."""
    if isinstance(out_dtype, str) and out_dtype == _NVFP4:
        rule = "not implemented, expected a torch.dtype"
        raise UnsupportedError(f"out_dtype: {rule}, got {shown(_NVFP4)}")
    if out is not None:
        require_tensor(out, "out")
    query = require_tensor(query, "query")
    if out_dtype is None:
        return query.dtype if out is None else out.dtype
    if not isinstance(out_dtype, torch.dtype):
        reject("out_dtype", "a torch.dtype", shown(out_dtype))
    if out is not None and out.dtype is not out_dtype:
        reject_dtype("out.dtype", f"{out_dtype} (out_dtype)", out.dtype)
    return out_dtype


def query_length(q_len_per_req: object, max_q_len: object, cum_seq_lens_q: object) -> int:
    """Return the query tokens of every request, or their maximum with ``cum_seq_lens_q``."""
    if cum_seq_lens_q is None:
        if max_q_len is not None:
            require_whole_number(max_q_len, "max_q_len")
        if q_len_per_req is None:
            return 1
        return require_whole_number(q_len_per_req, "q_len_per_req", min_value=1)
    if max_q_len is None:
        reject("max_q_len", "an int (required with cum_seq_lens_q)", "None")
    # The bound of ragged queries is 2 or more, of which one token each is a case.
    return max(2, require_whole_number(max_q_len, "max_q_len"))


def natural_scale(
    bmm1_scale: float | torch.Tensor, bmm1_scale_log2: object, query: torch.Tensor
) -> float | torch.Tensor:
    """Return the factor of the scores in the natural domain."""
    if bmm1_scale_log2 is None:
        return bmm1_scale
    scale = require_tensor(bmm1_scale_log2, "bmm1_scale_log2")
    require_scale(scale, "bmm1_scale_log2", require_tensor(query, "query").device)
    require_memory(scale, "bmm1_scale_log2")
    return scale * math.log(2)
