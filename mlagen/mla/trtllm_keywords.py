"""Rare keywords of TensorRT-LLM's signature, its positional orders and its top-k lengths."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.errors import UnsupportedError
from mlagen.families.common.arguments import (
    INT32_MAX,
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
)
from mlagen.families.common.memory import require_memory, require_plain, require_writable
from mlagen.families.common.xqa_arguments import check_unread_buffer
from mlagen.families.mla.args import MlaArgNames
from mlagen.mla.dcp_keywords import is_dcp

_JOINED = MlaArgNames()
_IN_PARTS = MlaArgNames(query="query[0]", query_rope="query[1]")

_AUTO = "auto"
_SYNONYMS = (_AUTO, "xqa", "trtllm-gen", "cute-dsl")

_SPARSE = "sparse"
_IMPLEMENTATIONS = (_AUTO, "modular", "monolithic")
_SCALE_FORMATS = (_AUTO, "pow2_fp32", "arbitrary_fp32")


def rare_keywords(
    call: dict[str, Any],
) -> tuple[bool | None, torch.Tensor, torch.Tensor | None]:
    """Return ``enable_pdl``, ``seq_lens`` and ``sparse_mla_top_k_lens`` of a call.

    ``call`` has all arguments by name, as the caller passed them.
    """
    check_unread_buffer(call, "multi_ctas_kv_counter_buffer")
    enable_pdl, backend = _in_order(
        call["skip_softmax_threshold_scale_factor"], call["enable_pdl"], call["backend"]
    )
    backend = require_choice(backend, "backend", (*_SYNONYMS, _SPARSE))
    require_choice(call["cute_dsl_impl"], "cute_dsl_impl", _IMPLEMENTATIONS)
    scale_format = call["kv_scale_format"]
    if isinstance(scale_format, str):  # in any case, as in FlashInfer
        scale_format = str.lower(scale_format).replace("-", "_")
    require_choice(scale_format, "kv_scale_format", _SCALE_FORMATS)
    if call["use_fp16_softmax"] is not None:
        require_flag(call["use_fp16_softmax"], "use_fp16_softmax")
    has_dcp = is_dcp(call)
    query, seq_lens, cu_seqlens_q = (call[k] for k in ("query", "seq_lens", "cum_seq_lens_q"))
    top_k = require_whole_number(call["sparse_mla_top_k"], "sparse_mla_top_k")
    top_k_lens = call["sparse_mla_top_k_lens"]
    if backend == _SPARSE:
        others = {"sparse_mla_top_k_lens": top_k_lens, "cum_seq_lens_q": cu_seqlens_q}
        lengths = _topk_lengths_of(query, call["kv_cache"], seq_lens, top_k, **others)
        return enable_pdl, *lengths
    if has_dcp and top_k:  # the top-k indices name this rank's tokens
        seq_lens = None
    return enable_pdl, _default_seq_lens(query, seq_lens, top_k, cu_seqlens_q), top_k_lens


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
    kv_cache: torch.Tensor, block_tables: object, is_shared: object, sparse_mla_top_k: object
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
    if require_whole_number(sparse_mla_top_k, "sparse_mla_top_k"):
        rule = "not implemented with sparse_mla_top_k, expected True"
        raise UnsupportedError(f"{name}: {rule}, got False")
    require_dims(require_tensor(block_tables, "block_tables"), "block_tables", (3,))
    return kv_cache


def _in_order(factor: Any, enable_pdl: Any, backend: Any) -> tuple[bool | None, Any]:
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
    require_whole_number(top_k, "sparse_mla_top_k", min_value=1)
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
