"""Paged MLA decode with the signature of TensorRT-LLM in ``flashinfer.mla``."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.entry_point import OUT_AND_LSE, entry_point
from mlagen.errors import UnsupportedError
from mlagen.families.common.arguments import (
    INT32_MAX,
    check_counter_buffer,
    chooses_batch_invariant,
    is_pdl_enabled,
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
    unwrap_sinks,
)
from mlagen.families.common.memory import require_memory, require_plain, require_writable
from mlagen.families.dispatch import MLA
from mlagen.families.mla.args import MlaArgNames, MlaArgs
from mlagen.torch_ops.outputs import mla_output
from mlagen.torch_ops.traced import Op

_JOINED = MlaArgNames()
_IN_PARTS = MlaArgNames(query="query[0]", query_rope="query[1]")

_AUTO = "auto"
_SYNONYMS = (_AUTO, "xqa", "trtllm-gen", "cute-dsl", "cake")

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
    check_counter_buffer(counter_buffer, query)
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

    Raises ArgumentError if the block tables have no axis for both; UnsupportedError in a sparse
    call.
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


@entry_point(
    MLA,
    outputs="out lse",
    returns=OUT_AND_LSE,
    ignored="qk_nope_head_dim is_var_seq",
    length="max_seq_len",
    op=Op(output=mla_output, has_lse=True, is_lse_flat=True),
)
def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,  # noqa: ARG001 - any dimension before absorption
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,  # noqa: ARG001 - a hint of FlashInfer
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    sparse_mla_top_k_lens: torch.Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
    *,
    batch_invariant: bool | None = None,
) -> MlaArgs:
    """Decode one step of multi-head latent attention over a paged KV cache.

    The first call compiles the kernel, and later calls and processes load it from the on-disk
    cache. Query token ``i`` of ``q_len`` attends to the cached tokens ``0 .. seq_len - q_len + i``.
    A fully masked row gives zeros, and its sink as LSE, or minus infinity without one. Tensors on
    the CPU use a slow PyTorch backend with the same checks. The call does not synchronize with the
    device.

    Parameters
    ----------
    query : bf16, fp16 or e4m3 [batch, q_len, heads, head_dim_qk], or [tokens, heads, head_dim_qk]
        Absorbed queries, latent part first; ``head_dim_qk = kv_lora_rank + qk_rope_head_dim``. The
        ragged layout requires ``cum_seq_lens_q``. 1 to 256 heads. A pair ``(q_nope, q_pe)`` of the
        latent and the rope part, each with strides of its own, spares the caller a concatenation.
    kv_cache : [pages, page_size, head_dim_qk]
        The paged latent cache, of the query's dtype, or e4m3 with a 16-bit query; an axis of size 1
        before or after ``page_size`` is accepted. The first ``kv_lora_rank`` elements of a token
        are also its value. Any page size, and any strides that are multiples of 16 bytes. A uint8
        cache is DeepSeek-V3.2's FP8 KV cache, fp8_ds_mla, of width 656: 512 e4m3, 4 fp32 scales for
        128 of them each, and 64 bf16. With ``qk_rope_head_dim`` 0 the width is 528 or more, and the
        bytes of a token from 528 on are not read.
    workspace_buffer : any dtype
        Scratch of at least :func:`mlagen.workspace_bytes` bytes; a call uses its end. It needs no
        initial value.
    qk_nope_head_dim : int
        Ignored; the dimension before absorption.
    kv_lora_rank, qk_rope_head_dim : int
        The two parts of ``head_dim_qk``.
    block_tables : int32 or uint32 [batch, max_pages]
        Page ids; entries from ``ceil(seq_len / page_size)`` on are never read. The result of a
        request with a used id out of range is unspecified. Without ``uses_shared_paged_kv_idx``
        ``[batch, 2, max_pages]``, for keys and for values. With ``sparse_mla_top_k`` the sparse
        top-k indices ``page * page_size + slot``, exactly ``[batch, q_len, sparse_mla_top_k]`` or
        ``[tokens, sparse_mla_top_k]``.
    seq_lens : int32 or uint32 [batch]
        Tokens in the cache, including the ``q_len`` new ones. None with ``sparse_mla_top_k`` only:
        query tokens use all of their indices, and one small kernel writes the lengths for that. See
        ``backend`` for other layouts.
    max_seq_len : int
        The maximum of ``seq_lens``. It affects the scheduling, not the result.
    sparse_mla_top_k : int
        Number of top-k indices of each query token; 0 for dense attention. A query token attends to
        the first ``min(its causal length, sparse_mla_top_k)`` indices; indices out of range are
        skipped, and duplicates count.
    out : [..., heads, kv_lora_rank]
        Written and returned; allocated if None. Of the query's dtype, bf16 for e4m3. If q_len is 1,
        ``[batch, heads, kv_lora_rank]`` too. With an fp16 query bf16 too: the fp16 result is copied
        to it.
    bmm1_scale : float or fp32 tensor of one element
        Multiplies the scores before softmax; no other factor applies: e.g. ``192 ** -0.5`` for
        DeepSeek-V3, times the scales of e4m3 operands. Natural domain; no factor of log2(e).
        Infinities and NaNs propagate by IEEE arithmetic; a float beyond float32 is rejected.
    bmm2_scale : float or fp32 tensor of one element
        Multiplies the output.
    sinks : fp32, bf16 or fp16 [heads]
        Natural-domain logits, unscaled, added to the softmax denominator without a value: minus
        infinity has no effect, infinity gives zeros. A list of one such tensor is accepted. 16-bit
        sinks are converted to fp32 at every call, by one small kernel.
    skip_softmax_threshold_scale_factor : float
        Ignored: no KV block is skipped, and the result is exact.
    enable_pdl : bool
        Whether to use programmatic dependent launch; None means yes where the GPU supports it. The
        CTAs of an sm90 kernel wait for each other, so it is a cooperative launch, whose CTAs start
        together when all of them fit.
    backend : str
        ``auto``, ``xqa``, ``trtllm-gen``, ``cute-dsl`` and ``cake`` are equivalent. With ``sparse``
        the cache is fp8_ds_mla, and ``seq_lens`` has the top-k lengths, ``[batch, q_len]`` or
        ``[batch * q_len]``. None, and ``[batch]`` with q_len above 1, mean all
        ``sparse_mla_top_k``.
    is_var_seq : bool
        Ignored; a scheduling hint in FlashInfer.
    uses_shared_paged_kv_idx : bool
        Whether keys and values have the same page ids; see ``block_tables``.
    lse : fp32 [tokens, heads] or [batch, q_len, heads]
        Written and returned if ``return_lse``; allocated if None.
    return_lse : bool
        Whether to return ``(out, lse)``: the logarithm of the softmax denominator, including the
        sink.
    cute_dsl_impl : str
        ``auto``, ``modular`` or ``monolithic``; ignored.
    kv_scale_format : str
        ``auto``, ``pow2_fp32`` or ``arbitrary_fp32``, in any case; ignored: scales of fp8_ds_mla
        may be any numbers.
    cum_seq_lens_q : int32 or uint32 [batch + 1]
        Offsets of the requests' query tokens, for ragged queries. Results of query tokens that
        belong to no request are unspecified.
    max_q_len : int
        The maximum ``q_len``, an optional scheduling hint.
    multi_ctas_kv_counter_buffer : torch.Tensor
        Ignored and unchanged; of any size and content, on the device of the query.
    sparse_mla_top_k_lens : int32 or uint32 [tokens]
        The top-k length of each query token, instead of its causal length from ``seq_lens``.
    enable_dcp : bool
        Whether this GPU holds the tokens of one rank only, of ``cp_world`` in decode context
        parallel: token ``k`` of its cache is token ``cp_world * k + cp_rank`` of the request.
        ``seq_lens``, ``max_seq_len`` and ``block_tables`` are of this rank's tokens. Requires
        ``return_lse``; :func:`mlagen.cascade.merge_states` combines the results of the ranks. One
        rank only may pass ``sinks``. With ``sparse_mla_top_k`` the indices name this rank's
        tokens, without a causal mask, and ``seq_lens`` is not used.
    cp_world : int
        Number of ranks, 1 or more.
    cp_rank : int
        This rank, from 0 on.
    causal_seqlens_kv_global : int32 or uint32 [batch]
        With ``enable_dcp``: tokens of the requests on all ranks, including the ``q_len`` new ones.
        Query token ``i`` attends to the tokens ``0 .. length - q_len + i`` that this rank has.
    use_fp16_softmax : bool
        Ignored: the softmax is in fp32.
    return_lse_base : str
        ``base2`` or ``basee``: log2 or natural logarithm; None means ``base2``, or ``basee`` with
        ``enable_dcp``.
    batch_invariant : bool
        Whether the bits of a request's results must not depend on the rest of the batch; None means
        what ``MLAGEN_BATCH_INVARIANT`` says.

    Returns
    -------
    torch.Tensor
        ``out``, or ``(out, lse)``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; no kernel is launched, and the outputs are unchanged.
    UnsupportedError
        If no kernel supports the dtypes, dimensions or lookup.
    CaptureError
        If the kernel is not loaded yet during CUDA graph capture.

    Notes
    -----
    Signature of ``flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla``, in both of its positional
    orders of ``enable_pdl`` and ``backend``. Pass everything after ``sinks`` by keyword.
    """
    latent, rope, names = query_parts(query, qk_rope_head_dim)
    pdl, backend = in_order(skip_softmax_threshold_scale_factor, enable_pdl, backend)
    words = (cute_dsl_impl, kv_scale_format, use_fp16_softmax, multi_ctas_kv_counter_buffer)
    is_sparse = checked_backend(latent, backend, *words)
    top_k = require_whole_number(sparse_mla_top_k, "sparse_mla_top_k")
    fields = dcp_fields(
        latent,
        cum_seq_lens_q,
        enable_dcp=enable_dcp,
        return_lse=return_lse,
        return_lse_base=return_lse_base,
        cp_world=cp_world,
        cp_rank=cp_rank,
        causal_seqlens_kv_global=causal_seqlens_kv_global,
    )
    given = (latent, kv_cache, seq_lens, cum_seq_lens_q, top_k, sparse_mla_top_k_lens)
    lengths, top_k_lens = lengths_of(*given, is_sparse=is_sparse, has_dcp=bool(enable_dcp))
    if top_k:  # the top-k indices name this rank's tokens, without a causal mask
        fields = {name: fields[name] for name in ("return_lse", "return_lse_base")}
    return MlaArgs(
        query=latent,
        kv_cache=kv_cache,
        workspace_buffer=workspace_buffer,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        block_tables=block_tables,
        seq_lens=lengths,
        max_seq_len=max_seq_len,
        out=fp16_target(latent, out),
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=unwrap_sinks(sinks),
        lse=lse,
        cum_seq_lens_q=cum_seq_lens_q,
        max_q_len=max_q_len,
        top_k=top_k,
        top_k_lens=top_k_lens,
        query_rope=rope,
        value_cache=separate_values(kv_cache, block_tables, uses_shared_paged_kv_idx, top_k),
        enable_pdl=is_pdl_enabled(pdl),
        names=names,
        batch_invariant=chooses_batch_invariant(batch_invariant),
        **fields,
    )
