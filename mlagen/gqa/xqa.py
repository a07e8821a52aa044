"""Paged grouped-query decode with the signatures of XQA, in ``flashinfer.decode`` and ``.xqa``."""

from __future__ import annotations

import torch

from mlagen.entry_point import NOTHING, OUT_AND_LSE, entry_point
from mlagen.families.common.arguments import (
    canonical_sinks,
    chooses_batch_invariant,
    is_pdl_enabled,
    require_choice,
    require_dims,
    require_scale,
    require_tensor,
    require_whole_number,
)
from mlagen.families.common.xqa_arguments import check_unused, require_size, table_capacity
from mlagen.families.dispatch import GQA
from mlagen.families.gqa.args import (
    LAYOUTS,
    GqaArgNames,
    GqaArgs,
    pair_of,
    positive_factor,
    soft_cap_of,
    window_of,
)
from mlagen.torch_ops.outputs import gqa_output, unused_by_xqa, xqa_output
from mlagen.torch_ops.traced import Op


@entry_point(
    GQA,
    outputs="out lse",
    returns=OUT_AND_LSE,
    length="max_seq_len",
    op=Op(output=gqa_output, has_lse=True),
)
def xqa_batch_decode_with_kv_cache(
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
    sinks: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float = 1.0,
    mask: torch.Tensor | None = None,
    kv_cache_sf: torch.Tensor
    | tuple[torch.Tensor, torch.Tensor]
    | list[torch.Tensor]
    | None = None,
    q_cu_seq_lens: torch.Tensor | None = None,
    *,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    return_lse_base: str = "base2",
    causal: bool = True,
    logits_soft_cap: float | None = None,
    batch_invariant: bool | None = None,
) -> GqaArgs:
    """Decode one or more tokens of each request by grouped-query attention over a paged KV cache.

    The first call compiles the kernel, and later calls and processes load it from the on-disk
    cache. The last ``q_len`` of the ``seq_len`` tokens of a request are the query's own, the drafts
    (speculative tokens): query token ``i`` attends to every token before the drafts, and to the
    drafts that ``mask`` allows. A fully masked row gives zeros, and its sink as LSE, or minus
    infinity without one. Tensors on the CPU use a slow PyTorch backend with the same checks.

    Parameters
    ----------
    query : bf16 or fp16 [batch * q_len_per_req, heads, head_dim], or [tokens, heads, head_dim]
        The ragged layout requires ``q_cu_seq_lens``. Any strides that are multiples of 16 bytes.
        See the support table for ``head_dim``; ``heads`` is a multiple of ``kv_heads``.
    kv_cache : as query, e4m3, e5m2, int8, or uint8 with kv_cache_sf
        A tuple or list of keys and values ``[pages, page_size, kv_heads, head_dim]``, one tensor
        ``[pages, 2, page_size, kv_heads, head_dim]`` of both, or ``[pages, 1, ...]`` where keys are
        values; ``kv_heads`` before ``page_size`` if ``kv_layout`` is ``HND``. Keys and values have
        separate strides, any multiples of 16 bytes; the last dimension of values in a tensor of
        their own may be smaller, a multiple of 16, and is that of the output then. A byte of a
        uint8 cache holds two e2m1 (NVFP4), the first in the lower half: the last dimension is half
        as many then.
    workspace_buffer : any dtype
        Scratch of at least :func:`mlagen.workspace_bytes` bytes; a call uses its end. It needs no
        initial value, and holds no semaphores.
    block_tables : int32 or uint32 [batch, max_pages]
        Page ids, for keys and values; entries from ``ceil(seq_len / page_size)`` on are never read.
        The result of a request with a used id out of range is unspecified.
    seq_lens : int32 or uint32 [batch]
        Tokens in the cache, including the new ones.
    max_seq_len : int
        The maximum of ``seq_lens``. It affects the scheduling, not the result.
    bmm1_scale : float or fp32 tensor of one element
        Multiplies the scores before softmax: ``q_scale * k_scale * sm_scale``. Natural domain; no
        factor of log2(e), and no other factor applies.
    bmm2_scale : float or fp32 tensor of one element
        Multiplies the output: ``v_scale / o_scale``.
    window_left : int
        Number of tokens before its own that a row attends to; unlimited if negative.
    out : as query, or e4m3 where the cache is e4m3 [..., heads, head_dim]
        Written and returned; allocated if None. ``[tokens, heads, head_dim]`` or
        ``[batch, q_len_per_req, heads, head_dim]``.
    sinks : fp32, bf16 or fp16 [heads] or [kv_heads, heads / kv_heads]
        Natural-domain logits, unscaled, added to the softmax denominator without a value. 16-bit
        sinks are converted to fp32 at every call, by one small kernel.
    kv_layout : str
        ``NHD`` or ``HND``.
    enable_pdl : bool
        Whether to use programmatic dependent launch; None means yes where the GPU supports it.
    q_len_per_req : int
        Query tokens of every request, 1 if None; with ``q_cu_seq_lens`` the maximum, 2 or more. A
        number below the true one gives unspecified results.
    o_scale : float
        The scale of an e4m3 output. It multiplies a 16-bit output, so that ``bmm2_scale`` is the
        same for both.
    mask : uint16 [batch, q_len_per_req, ceil(q_len_per_req / 32) * 2], or [tokens, ...]
        The packed tree mask: bit ``j`` of a row, from the lowest, is set if that query token
        attends to draft ``j`` of its request, including its own. Views of the same bytes as uint32
        or int32 are accepted. None means causal: drafts ``0 .. i``. Ignored if ``q_len_per_req`` is
        1.
    kv_cache_sf : e4m3 or uint8 [..., head_dim / 16], or fp32
        One scale for 16 elements of an NVFP4 cache, in one of the layouts of ``kv_cache``; or one
        for a token and KV head of an e4m3, e5m2 or int8 cache, in one of these layouts without
        ``head_dim``, with any strides: keys and values may have any strides of 4 bytes then, as in
        rows that hold a scale behind them.
    q_cu_seq_lens : int32 or uint32 [batch + 1]
        Offsets of the requests' query tokens, for ragged queries; a request may have none. Results
        of query tokens that belong to no request are unspecified.
    lse : fp32 [tokens, heads] or [batch, q_len_per_req, heads]
        Written and returned if ``return_lse``; allocated if None, in the shape of the output
        without ``head_dim``.
    return_lse : bool
        Whether to return ``(out, lse)``: the logarithm of the softmax denominator, including the
        sink. The scales of the output do not affect it.
    return_lse_base : str
        ``base2`` or ``basee``: log2 or natural logarithm.
    causal : bool
        False: every query token attends to all ``seq_len`` tokens, whose number may be below
        ``q_len``, as of a prefix that requests share. It excludes ``mask`` and a window.
    logits_soft_cap : float
        Scores, scaled, become ``logits_soft_cap * tanh(score / logits_soft_cap)``, before any mask;
        sinks do not. None or 0: none.
    batch_invariant : bool
        Whether the bits of a request's results must not depend on the rest of the batch; None means
        what ``MLAGEN_BATCH_INVARIANT`` says.

    Returns
    -------
    torch.Tensor
        ``out``, or ``(out, lse)``; ``out``, if allocated here, of the query's dtype,
        ``[batch, heads, head_dim]`` if ``q_len_per_req`` is 1, ``[batch, q_len_per_req, heads,
        head_dim]`` if it is more, and ``[tokens, heads, head_dim]`` with ``q_cu_seq_lens``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; no kernel is launched, and the outputs are unchanged.
    UnsupportedError
        If no kernel supports the dtypes or head dimension.
    CaptureError
        If the kernel is not loaded yet during CUDA graph capture.

    Notes
    -----
    Signature of ``flashinfer.decode.xqa_batch_decode_with_kv_cache``, with an LSE. Unlike there,
    both scales mean the same for every dtype of the cache.
    """
    keys, cached_values = pair_of(kv_cache, "kv_cache")
    scales = pair_of(kv_cache_sf, "kv_cache_sf")
    return GqaArgs(
        query=query,
        key_cache=keys,
        value_cache=cached_values,
        workspace_buffer=workspace_buffer,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=max_seq_len,
        q_len=1 if q_len_per_req is None else q_len_per_req,
        kv_layout=kv_layout,
        window=window_of(window_left, "window_left"),
        soft_cap=soft_cap_of(logits_soft_cap),
        out=out,
        lse=lse,
        return_lse=return_lse,
        return_lse_base=return_lse_base,
        is_causal=causal,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        out_16bit_factor=positive_factor(o_scale, "o_scale"),
        sinks=canonical_sinks(sinks),
        mask=mask,
        cum_seq_lens_q=q_cu_seq_lens,
        key_scales=scales[0],
        value_scales=scales[1],
        enable_pdl=is_pdl_enabled(enable_pdl),
        batch_invariant=chooses_batch_invariant(batch_invariant),
    )


_NAMES = GqaArgNames(
    query="q",
    kv_cache="k_cache",
    key_cache="k_cache",
    value_cache="v_cache",
    kv_scales="k_sf_cache",
    key_scales="k_sf_cache",
    value_scales="v_sf_cache",
    block_tables="page_table",
    q_len="q_seq_len",
    out="output",
    return_lse_base="lse_base",
    window="sliding_win_size",
    bmm1_scale="q_scale",
    bmm2_scale="kv_scale",
)


@entry_point(
    GQA,
    outputs="output lse",
    returns=NOTHING,
    op=Op(output=xqa_output, has_lse=True, constants=unused_by_xqa),
)
def xqa(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: torch.Tensor | None = None,
    q_scale: float | torch.Tensor = 1.0,
    kv_scale: float | torch.Tensor = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: torch.Tensor | None = None,
    *,
    q_cu_seq_lens: torch.Tensor | None = None,
    k_sf_cache: torch.Tensor | None = None,
    v_sf_cache: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    lse_base: str = "base2",
    causal: bool = True,
    batch_invariant: bool | None = None,
) -> GqaArgs:
    """Decode one or more tokens of each request by grouped-query attention, into ``output``.

    The scores are ``q_scale * kv_scale / sqrt(head_dim) * (Q K^T)``, and the output is
    ``kv_scale * (P V)``. ``kv_scale`` counts as 1 with a 16-bit cache. Masking, and everything that
    is not documented here, is as in :func:`mlagen.decode.xqa_batch_decode_with_kv_cache`.

    Parameters
    ----------
    q : bf16 or fp16 [batch, 1, heads, head_dim], [batch, 1, q_seq_len, heads, head_dim], or ragged
        The second layout requires ``q_seq_len`` above 1, and ``[tokens, heads, head_dim]`` requires
        ``q_cu_seq_lens``.
    k_cache, v_cache : as q, e4m3, e5m2, int8, or uint8 with scales
        ``[pages, page_size, num_kv_heads, head_dim]``, or with tokens and heads swapped if
        ``kv_layout`` is ``HND``. They have separate strides, and may be views of one tensor.
    page_table : int32 or uint32 [batch, max_pages]
        Page ids. The width affects the scheduling, not the result.
    seq_lens : int32 or uint32 [batch, 1] or [batch]
        Tokens in the cache, including the new ones.
    output : as q, or e4m3 where the cache is e4m3
        Written; of the shape of ``q``, with the dims of a value if these are fewer.
    semaphores : uint32 or int32
        Accepted for compatibility; ignored and unchanged, of any size and content.
    num_kv_heads, page_size : int
        As in the caches.
    q_scale, kv_scale : float or fp32 tensor of one element
        As above; natural domain.
    sliding_win_size : int
        Number of tokens that a row attends to, including its own; unlimited if 0 or less.
    sm_count : int
        Ignored; the kernels use all SMs.
    rcp_out_scale : float
        Multiplies an e4m3 output, and no other.
    q_seq_len : int
        Query tokens of every request; with ``q_cu_seq_lens`` the maximum, 2 or more.
    k_sf_cache, v_sf_cache : e4m3 or uint8 [..., head_dim / 16], or fp32 [...]
        One scale for 16 elements of an NVFP4 cache, or for a token and KV head, in the layout of
        the caches.
    lse : fp32 [tokens, heads], or as q without head_dim
        Written if given.
    lse_base : str
        ``base2`` or ``basee``: log2 or natural logarithm.
    workspace_buffer, sinks, kv_layout, enable_pdl, mask, q_cu_seq_lens, causal, batch_invariant
        As there.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; no kernel is launched, and the outputs are unchanged.
    UnsupportedError
        If no kernel supports the dtypes or head dimension.
    CaptureError
        If the kernel is not loaded yet during CUDA graph capture.

    Notes
    -----
    Signature of ``flashinfer.xqa.xqa``, with an LSE.
    """
    page_size = require_whole_number(page_size, "page_size", min_value=1)
    kv_layout = require_choice(kv_layout, "kv_layout", LAYOUTS)
    check_unused(q, semaphores, sm_count)
    require_tensor(output, "output")
    # A launch over a 16-bit cache does not pass it.
    require_scale(kv_scale, "kv_scale", q.device)
    if k_sf_cache is not None or v_sf_cache is not None:
        require_tensor(k_sf_cache, "k_sf_cache")
        require_tensor(v_sf_cache, "v_sf_cache")
    sizes = {"num_kv_heads": num_kv_heads, "page_size": page_size}
    _check_caches(k_cache, v_cache, kv_layout=kv_layout, **sizes)
    return GqaArgs(
        query=q,
        key_cache=k_cache,
        value_cache=v_cache,
        workspace_buffer=workspace_buffer,
        block_tables=page_table,
        seq_lens=seq_lens,
        max_seq_len=table_capacity(page_table, page_size),
        q_len=q_seq_len,
        kv_layout=kv_layout,
        window=window_of(sliding_win_size, "sliding_win_size", has_own=True),
        out=output,
        lse=lse,
        return_lse=lse is not None,
        return_lse_base=lse_base,
        is_causal=causal,
        bmm1_scale=q_scale,
        bmm2_scale=kv_scale,
        out_e4m3_factor=positive_factor(rcp_out_scale, "rcp_out_scale"),
        sinks=canonical_sinks(sinks),
        mask=mask,
        cum_seq_lens_q=q_cu_seq_lens,
        key_scales=k_sf_cache,
        value_scales=v_sf_cache,
        with_beam_axis=True,
        scales_like_xqa=True,
        enable_pdl=is_pdl_enabled(enable_pdl),
        batch_invariant=chooses_batch_invariant(batch_invariant),
        names=_NAMES,
    )


def _check_caches(
    k_cache: object, v_cache: object, *, num_kv_heads: object, page_size: object, kv_layout: object
) -> None:
    """Reject caches whose sizes differ from ``num_kv_heads`` and ``page_size``."""
    keys = require_tensor(k_cache, "k_cache")
    require_tensor(v_cache, "v_cache")
    require_dims(keys, "k_cache", (4,))
    tokens, heads = (2, 1) if kv_layout == "HND" else (1, 2)
    require_size(num_kv_heads, "num_kv_heads", keys.shape[heads])
    require_size(page_size, "page_size", keys.shape[tokens])
