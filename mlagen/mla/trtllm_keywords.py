"""Rare keywords of TensorRT-LLM's signature, its positional orders and its top-k lengths."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.errors import UnsupportedError
from mlagen.families.common.arguments import (
    INT32_MAX,
    check_unread_buffer,
    reject,
    require,
    require_choice,
    require_contiguous,
    require_dims,
    require_dtype,
    require_flag,
    require_ints,
    require_number,
    require_shape,
    require_tensor,
    require_whole_number,
    shown,
)
from mlagen.families.common.memory import require_memory, require_plain, require_writable
from mlagen.families.mla.args import MlaArgNames

_JOINED = MlaArgNames()
_IN_PARTS = MlaArgNames(query="query[0]", query_rope="query[1]")

_AUTO = "auto"
_SYNONYMS = (_AUTO, "xqa", "trtllm-gen", "cute-dsl")

_SPARSE = "sparse"
_IMPLEMENTATIONS = (_AUTO, "modular", "monolithic")
_WITHOUT_DCP = {"cp_world": 1, "cp_rank": 0, "causal_seqlens_kv_global": None}
_SCALE_FORMATS = (_AUTO, "pow2_fp32", "arbitrary_fp32")


def checked_backend(
    query: object,
    backend: object,
    cute_dsl_impl: object,
    kv_scale_format: object,
    use_fp16_softmax: object,
    counter_buffer: object,
) -> bool:
    """Return whether the backend is ``sparse``, after checking keywords that change no result."""
    check_unread_buffer("multi_ctas_kv_counter_buffer", counter_buffer, query)
    word = require_choice(backend, "backend", (*_SYNONYMS, _SPARSE))
    require_choice(cute_dsl_impl, "cute_dsl_impl", _IMPLEMENTATIONS)
    if isinstance(kv_scale_format, str):  # in any case, as in FlashInfer
        kv_scale_format = str.lower(kv_scale_format).replace("-", "_")
    require_choice(kv_scale_format, "kv_scale_format", _SCALE_FORMATS)
    if use_fp16_softmax is not None:
        require_flag(use_fp16_softmax, "use_fp16_softmax")
    return word == _SPARSE


def dcp_fields(
    query: Any,
    cum_seq_lens_q: Any,
    *,
    enable_dcp: object,
    return_lse: object,
    return_lse_base: object,
    **ranks: Any,
) -> dict[str, Any]:
    """Return the fields of ``MlaArgs`` that depend on decode context parallel (DCP).

    ``ranks`` are the keywords ``cp_world``, ``cp_rank`` and ``causal_seqlens_kv_global``.
    """
    world = require_whole_number(ranks["cp_world"], "cp_world", min_value=1)
    rank = require_whole_number(ranks["cp_rank"], "cp_rank")
    has_dcp, has_lse = (
        require_flag(enable_dcp, "enable_dcp"),
        require_flag(return_lse, "return_lse"),
    )
    default = "basee" if has_dcp else "base2"  # of FlashInfer
    fields = {
        "return_lse": has_lse,
        "return_lse_base": default if return_lse_base is None else return_lse_base,
    }
    if not has_dcp:
        for keyword, nothing in _WITHOUT_DCP.items():
            value = ranks[keyword]
            if value is not nothing and (nothing is None or value != nothing):
                reject(keyword, f"{nothing} without enable_dcp", shown(value))
        return fields
    require(rank < world, "cp_rank", f"less than {world} (cp_world)", rank)
    require(has_lse, "return_lse", "True with enable_dcp", "False")
    require_dims(require_tensor(query, "query"), "query", (4,) if cum_seq_lens_q is None else (3,))
    batch = query.shape[0]
    if cum_seq_lens_q is not None:
        offsets = require_tensor(cum_seq_lens_q, "cum_seq_lens_q")
        require_dims(offsets, "cum_seq_lens_q", (1,))
        batch = offsets.shape[0] - 1
    name = "causal_seqlens_kv_global"
    tokens = require_ints(ranks[name], name, query.device, ((batch,),), "requests")
    return {**fields, name: tokens, "cp_world": world, "cp_rank": rank}


def lengths_of(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    seq_lens: torch.Tensor | None,
    cum_seq_lens_q: torch.Tensor | None,
    top_k: int,
    top_k_lens: torch.Tensor | None,
    *,
    is_sparse: bool,
    has_dcp: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``seq_lens`` and ``sparse_mla_top_k_lens`` of a call."""
    if is_sparse:
        others = {"sparse_mla_top_k_lens": top_k_lens, "cum_seq_lens_q": cum_seq_lens_q}
        return _topk_lengths_of(query, kv_cache, seq_lens, top_k, **others)
    if has_dcp and top_k:  # the top-k indices name this rank's tokens
        seq_lens = None
    return _default_seq_lens(query, seq_lens, top_k, cum_seq_lens_q), top_k_lens


def query_parts(query: Any, qk_rope_head_dim: object) -> tuple[Any, Any, MlaArgNames]:
    """Return the query, or its latent part with its rope part, and their names."""
    if not isinstance(query, (tuple, list)):
        return query, None, _JOINED
    if len(query) != 2:
        reject("query", "a torch.Tensor or a pair (q_nope, q_pe)", f"{len(query)} parts")
    latent, rope = (require_tensor(part, f"query[{index}]") for index, part in enumerate(query))
    if require_whole_number(qk_rope_head_dim, "qk_rope_head_dim"):
        return latent, rope, _IN_PARTS
    require_plain(rope, "query[1]")
    require_plain(latent, "query[0]")
    require_shape(rope, "query[1]", ((*latent.shape[:-1], 0),), "no rope dims")
    return latent, None, _IN_PARTS


def separate_values(
    kv_cache: torch.Tensor, block_tables: object, is_shared: object, top_k: int
) -> torch.Tensor | None:
    """Return the cache as value cache if keys and values have separate page ids, else None.

    Raises
    ------
    ArgumentError
        If the block tables have no axis for both.
    UnsupportedError
        In a sparse call.
    """
    name = "uses_shared_paged_kv_idx"
    if require_flag(is_shared, name):
        return None
    if top_k:
        rule = "not implemented with sparse_mla_top_k, expected True"
        raise UnsupportedError(f"{name}: {rule}, got False")
    require_dims(require_tensor(block_tables, "block_tables"), "block_tables", (3,))
    return kv_cache


def in_order(factor: Any, enable_pdl: Any, backend: Any) -> tuple[bool | None, Any]:
    """Return ``enable_pdl`` and ``backend``, in the older or the newer positional order.

    The factor, ``skip_softmax_threshold_scale_factor``, is checked and ignored.
    """
    # The older order has no factor: the others are one position earlier.
    if isinstance(enable_pdl, str):
        factor, enable_pdl, backend = None, factor, enable_pdl
    elif enable_pdl is None and type(factor).__name__ in {"bool", "bool_"}:  # Python's, or numpy's
        factor, enable_pdl = None, factor
    if factor is not None:
        require_number(factor, "skip_softmax_threshold_scale_factor")
    return None if enable_pdl is None else require_flag(enable_pdl, "enable_pdl"), backend


def fp16_target(query: object, out: torch.Tensor | None) -> torch.Tensor | None:
    """Return the kernel's output: a new fp16 tensor for a bf16 ``out`` with an fp16 query."""
    if not isinstance(query, torch.Tensor) or not isinstance(out, torch.Tensor):
        return out
    if query.dtype is not torch.float16 or out.dtype is not torch.bfloat16:
        return out
    require_memory(out, "out")
    require_writable(out, "out")
    require_contiguous(out, "out")  # an expanded view would make the copy larger than its memory
    return torch.empty_like(out, dtype=torch.float16)


def _default_seq_lens(
    query: torch.Tensor,
    seq_lens: torch.Tensor | None,
    top_k: int,
    cum_seq_lens_q: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``seq_lens``, or if None lengths with which query tokens use all top-k indices."""
    if seq_lens is not None:
        return seq_lens
    if not top_k:
        reject("seq_lens", "a torch.Tensor (required without sparse_mla_top_k)", "None")
    shape = require_tensor(query, "query").shape
    require_dims(query, "query", (4,) if cum_seq_lens_q is None else (3,))
    batch, tokens = shape[0], shape[0]
    if cum_seq_lens_q is None:
        tokens *= shape[1]
    else:
        cu_seqlens_q = require_tensor(cum_seq_lens_q, "cum_seq_lens_q")
        require_dims(cu_seqlens_q, "cum_seq_lens_q", (1,))
        batch = max(0, cu_seqlens_q.shape[0] - 1)
    # Token i of a request attends to length - q_len + i + 1 tokens, and q_len <= tokens.
    max_len = min(top_k + tokens, INT32_MAX)
    return torch.full((batch,), max_len, dtype=torch.int32, device=query.device)


def _topk_lengths_of(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    seq_lens: torch.Tensor | None,
    top_k: int,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``seq_lens`` and ``sparse_mla_top_k_lens`` of a call with backend ``sparse``.

    Its ``seq_lens`` are top-k lengths: ``[batch, q_len]`` or ``[batch * q_len]``. None, and
    ``[batch]`` with several query tokens, mean all indices.
    """
    name = "with backend 'sparse'"
    for argument, value in others.items():
        require(value is None, argument, f"None {name}", "a value")
    require(top_k >= 1, "sparse_mla_top_k", "an int, 1 or more", top_k)
    require_dims(require_tensor(query, "query"), "query", (4,))
    cache = require_tensor(kv_cache, "kv_cache")
    require_dtype(cache, "kv_cache", (torch.uint8,), f"fp8_ds_mla, {name}")
    batch, q_len = query.shape[:2]
    if seq_lens is not None:
        allowed = ((batch, q_len), (batch * q_len,), (batch,))
        lengths = require_ints(seq_lens, "seq_lens", query.device, allowed, "batch, q_len")
        flat = lengths.view(-1)
        if q_len == 1:  # the sequence length acts as the top-k length
            return flat, None
        if lengths.numel() == batch * q_len:
            return flat[:batch], flat
    return _default_seq_lens(query, None, top_k, None), None
