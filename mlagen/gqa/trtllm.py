"""Paged grouped-query decode with the signature of TensorRT-LLM in ``flashinfer.decode``."""

from __future__ import annotations

import math
from typing import Any

import torch

from mlagen.entry_point import OUT_AND_LSE, entry_point
from mlagen.errors import UnsupportedError
from mlagen.families.common.arguments import (
    check_counter_buffer,
    chooses_batch_invariant,
    is_pdl_enabled,
    reject,
    reject_dtype,
    reject_unserved,
    require,
    require_choice,
    require_flag,
    require_ints,
    require_number,
    require_scale,
    require_tensor,
    require_whole_number,
    shown,
    unwrap_sinks,
)
from mlagen.families.common.memory import require_memory
from mlagen.families.dispatch import GQA
from mlagen.families.gqa.args import (
    GqaArgNames,
    GqaArgs,
    converted_query,
    pair_of,
    positive_factor,
    window_of,
)
from mlagen.gqa.top_k import with_top_k
from mlagen.torch_ops.outputs import trtllm_gqa_output
from mlagen.torch_ops.traced import Op

NAMES = GqaArgNames(cum_seq_lens_q="cum_seq_lens_q")
RAGGED_NAMES = NAMES._replace(q_len="max_q_len")

_BACKENDS = ("auto", "xqa", "trtllm-gen", "cake")
_TRANSFORM_MODES = ("k_only", "separate_kv")
_NVFP4 = "nvfp4"


def check_ignored_keywords(
    backend: object, threshold: object, transform_mode: object, length_aware_schedule: object
) -> None:
    """Reject keywords of a wrong type that change no result."""
    require_choice(backend, "backend", _BACKENDS)
    if threshold is not None:
        require_number(threshold, "skip_softmax_threshold_scale_factor")
    if transform_mode is not None:
        require_choice(transform_mode, "bf16q_fp8kv_transform_mode", _TRANSFORM_MODES)
    require_flag(length_aware_schedule, "length_aware_schedule")


def check_dcp(
    cp_world: object, cp_rank: object, causal_seqlens_kv_global: object, *, has_lse: bool
) -> dict[str, Any]:
    """Return the fields of ``GqaArgs`` of decode context parallel (DCP), which the tensor enables.

    Its shape, and what it excludes, are rules of the problem.
    """
    world = require_whole_number(cp_world, "cp_world", min_value=1)
    rank = require_whole_number(cp_rank, "cp_rank")
    name = "causal_seqlens_kv_global"
    if causal_seqlens_kv_global is None:
        for keyword, value, nothing in (("cp_world", world, 1), ("cp_rank", rank, 0)):
            require(value == nothing, keyword, f"{nothing} without {name}", value)
        return {}
    require(rank < world, "cp_rank", f"less than {world} (cp_world)", rank)
    require(has_lse, "return_lse", f"True, or an lse, with {name}", "False")
    lengths = require_tensor(causal_seqlens_kv_global, name)
    return {name: lengths, "cp_world": world, "cp_rank": rank}


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


@entry_point(
    GQA,
    outputs="out lse",
    returns=OUT_AND_LSE,
    length="max_seq_len",
    op=Op(output=trtllm_gqa_output, has_lse=True, fills_lse=True),
)
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: torch.Tensor
    | tuple[torch.Tensor, torch.Tensor]
    | list[torch.Tensor]
    | None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    bf16q_fp8kv_transform_mode: str | None = None,
    request_order: torch.Tensor | None = None,
    request_order_plan: object = None,
    sparse_top_k: int = 0,
    length_aware_schedule: bool = False,
    *,
    batch_invariant: bool | None = None,
) -> GqaArgs:
    """Decode one or more tokens of each request by grouped-query attention over a paged KV cache.

    The kernels, and all that is not documented here, are those of
    :func:`mlagen.decode.xqa_batch_decode_with_kv_cache`.

    Parameters
    ----------
    query : bf16, fp16 or e4m3 [tokens, heads, head_dim]
        ``tokens`` is ``batch * q_len_per_req``, or that of ``cum_seq_lens_q``. One small kernel
        converts e4m3 to the dtype of a 16-bit output, else to bf16.
    kv_cache : as query, e4m3, e5m2, int8, or uint8 with kv_cache_sf
        Keys and values, in one tensor or two.
    block_tables : int32 or uint32 [batch, max_pages]
        Page ids, for keys and values; ``[batch, 2, max_pages]`` without
        ``uses_shared_paged_kv_idx``, and with ``enable_block_sparse_attention`` as there.
    bmm1_scale, bmm2_scale : float or fp32 tensor of one element
        The whole factors of the scores and of the output; natural domain.
    out : as query, 16-bit for e4m3, or e4m3 where the cache is e4m3 [tokens, heads, head_dim]
        Written and returned; allocated if None. ``[batch, q_len_per_req, heads, head_dim]`` too.
    out_dtype : torch.dtype
        The dtype of ``out``; None means that of ``out`` or of the query. ``nvfp4`` has no kernel.
    o_sf_scale, o_sf_vec_size : None
        Of an NVFP4 output.
    sinks : fp32, bf16 or fp16 [heads], or a list of one such tensor
        Natural-domain logits, unscaled, added to the softmax denominator without a value.
    backend : str
        ``auto``, ``xqa``, ``trtllm-gen`` and ``cake`` are equivalent.
    q_len_per_req : int
        Query tokens of every request, 1 if None; ignored with ``cum_seq_lens_q``.
    o_scale : float
        Multiplies a 16-bit output; 1 if None.
    max_q_len : int
        The maximum number of query tokens of a request; required with ``cum_seq_lens_q``.
    cum_seq_lens_q : int32 or uint32 [batch + 1]
        Offsets of the requests' query tokens, for ragged queries.
    skip_softmax_threshold_scale_factor : float
        Ignored: no KV block is skipped, and the result is exact.
    uses_shared_paged_kv_idx : bool
        Whether keys and values have the same page ids; otherwise ``block_tables`` has those of keys
        and then those of values for each request.
    lse : fp32 [tokens, heads]
        Written if given; allocated if ``return_lse`` and None.
    return_lse : bool
        Whether to return ``(out, lse)``: the base-2 logarithm of the softmax denominator, including
        the sink.
    bmm1_scale_log2 : fp32 tensor of one element
        ``bmm1_scale`` times log2(e), instead of it; one small kernel converts it.
    multi_ctas_kv_counter_buffer : torch.Tensor
        Ignored and unchanged; of any size and content, on the device of the query.
    enable_block_sparse_attention : bool
        Whether each KV head has its own tokens: ``block_tables`` ``[kv_heads, batch, max_pages]``
        and ``seq_lens`` ``[kv_heads, batch]``, both contiguous, name its pages without gaps and
        count their tokens, and causality is by their order. It excludes a window, separate page
        ids, decode context parallel and ``skip_softmax_threshold_scale_factor``.
    cp_world, cp_rank : int
        The ranks of decode context parallel, and this one; 1 and 0 without
        ``causal_seqlens_kv_global``.
    causal_seqlens_kv_global : int32 or uint32 [batch]
        Enables decode context parallel: token ``k`` of this cache is token ``cp_world * k +
        cp_rank`` of the request. It has the tokens of the requests on all ranks, **without** the
        new ones: query token ``i`` attends to those up to its own position,
        ``causal_seqlens_kv_global + i``, of this rank's ``seq_lens``. The LSE must be requested,
        and merges the ranks (:mod:`mlagen.cascade`); pass ``sinks`` on one rank only. It excludes
        ``mask``, a window and separate page ids.
    bf16q_fp8kv_transform_mode : str
        ``k_only`` or ``separate_kv``; ignored.
    request_order : int32 or uint32 [batch]
        Ignored: the order in which requests are computed changes no result.
    request_order_plan : None
        Of FlashInfer's kernels.
    sparse_top_k : int
        Above 0, each query token attends to ``seq_lens[t]`` tokens at most, a number of its own:
        ``block_tables`` are ``[tokens, 2, sparse_top_k]``, indices ``page * page_size + slot`` of
        keys and then of values of the one KV head. There is no causal mask; an index below 0 or
        beyond the cache is skipped, with its other one. A multiple of 4; it excludes a mask, a
        window, sinks, ragged queries, decode context parallel and
        ``enable_block_sparse_attention``.
    length_aware_schedule : bool
        Ignored: every schedule follows ``seq_lens``.
    workspace_buffer, seq_lens, max_seq_len, window_left, kv_layout, enable_pdl, mask, kv_cache_sf
        As there; ``kv_layout`` is ``HND`` by default.
    batch_invariant : bool
        As there.

    Returns
    -------
    torch.Tensor
        ``out``, or ``(out, lse)``; ``out``, if allocated here, of the shape of the query, with the
        dims of a value if these are fewer, and ``lse`` without that dimension.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; the outputs are unchanged.
    UnsupportedError
        If no kernel supports the dtypes, the head dimension or a keyword.
    CaptureError
        If the kernel is not loaded yet during CUDA graph capture.

    Notes
    -----
    Signature of ``flashinfer.decode.trtllm_batch_decode_with_kv_cache``.
    """
    threshold = skip_softmax_threshold_scale_factor
    check_ignored_keywords(backend, threshold, bf16q_fp8kv_transform_mode, length_aware_schedule)
    check_counter_buffer(multi_ctas_kv_counter_buffer, query)
    dtype = output_dtype(query, out, out_dtype)
    reject_unserved("o_sf_scale", o_sf_scale, None)
    reject_unserved("o_sf_vec_size", o_sf_vec_size, None)
    reject_unserved("request_order_plan", request_order_plan, None)
    if request_order is not None:  # its contents change no result
        batch = tuple(require_tensor(seq_lens, "seq_lens").shape[:1])
        require_ints(request_order, "request_order", query.device, (batch,), "batch")
    has_lse = require_flag(return_lse, "return_lse") or lse is not None
    dcp = check_dcp(cp_world, cp_rank, causal_seqlens_kv_global, has_lse=has_lse)
    keys, cached_values = pair_of(kv_cache, "kv_cache")
    scales = pair_of(kv_cache_sf, "kv_cache_sf")
    is_shared = require_flag(uses_shared_paged_kv_idx, "uses_shared_paged_kv_idx")
    keyword = "enable_block_sparse_attention"
    has_head_tables = require_flag(enable_block_sparse_attention, keyword)
    if has_head_tables:
        require(is_shared, "uses_shared_paged_kv_idx", f"True with {keyword}", "False")
        name = "skip_softmax_threshold_scale_factor"
        require(threshold is None, name, f"None with {keyword}", threshold)
    args = GqaArgs(
        query=converted_query(query, "query", dtype),
        key_cache=keys,
        value_cache=cached_values,
        workspace_buffer=workspace_buffer,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=max_seq_len,
        q_len=query_length(q_len_per_req, max_q_len, cum_seq_lens_q),
        kv_layout=kv_layout,
        window=window_of(window_left, "window_left"),
        out=out,
        out_dtype=dtype,
        is_out_like_query=True,
        lse=lse,
        return_lse=has_lse,
        bmm1_scale=natural_scale(bmm1_scale, bmm1_scale_log2, query),
        bmm2_scale=bmm2_scale,
        out_16bit_factor=1.0 if o_scale is None else positive_factor(o_scale, "o_scale"),
        sinks=unwrap_sinks(sinks),
        mask=mask,
        cum_seq_lens_q=cum_seq_lens_q,
        separate_page_ids=not is_shared,
        has_head_tables=has_head_tables,
        **dcp,
        key_scales=scales[0],
        value_scales=scales[1],
        enable_pdl=is_pdl_enabled(enable_pdl),
        batch_invariant=chooses_batch_invariant(batch_invariant),
        names=NAMES if cum_seq_lens_q is None else RAGGED_NAMES,
    )
    return with_top_k(args, require_whole_number(sparse_top_k, "sparse_top_k"))
