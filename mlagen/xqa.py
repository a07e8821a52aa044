"""Decode with the signatures of XQA: the entry points of ``flashinfer.xqa``."""

from __future__ import annotations

import torch

from mlagen.entry_point import NOTHING, entry_point
from mlagen.families.common.arguments import (
    canonical_sinks,
    is_pdl_enabled,
    require_choice,
    require_scale,
    require_tensor,
    require_whole_number,
)
from mlagen.families.common.xqa_arguments import (
    check_caches,
    check_scale_caches,
    check_unused,
    table_capacity,
)
from mlagen.families.dispatch import GQA
from mlagen.families.gqa.args import LAYOUTS, GqaArgNames, GqaArgs, positive_factor, window_of
from mlagen.mla.xqa import xqa_mla
from mlagen.torch_ops.outputs import unused_by_xqa, xqa_outputs
from mlagen.torch_ops.traced import Op

__all__ = ["xqa", "xqa_mla"]

_XQA_NAMES = GqaArgNames(
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
    op=Op(outputs=xqa_outputs, has_lse=True, constants=unused_by_xqa),
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
    k_cache, v_cache : as q, e4m3, int8, or uint8 with scales
        ``[pages, page_size, num_kv_heads, head_dim]``, or with tokens and heads swapped if
        ``kv_layout`` is ``HND``. They have separate strides, and may be views of one tensor.
    page_table : int32 or uint32 [batch, max_pages]
        Page ids. The width affects the scheduling, not the result.
    seq_lens : int32 or uint32 [batch, 1] or [batch]
        Tokens in the cache, including the new ones.
    output : as q, or e4m3 where the cache is e4m3
        Written; of the shape of ``q``.
    workspace_buffer : any dtype
        Scratch of at least :func:`mlagen.workspace_bytes` bytes; a call uses its end. It needs no
        initial value.
    semaphores : uint32 or int32
        Accepted for compatibility; ignored and unchanged, of any size and content.
    num_kv_heads, page_size : int
        As in the caches.
    sinks : fp32, bf16 or fp16 [num_kv_heads, heads / num_kv_heads] or [heads]
        Natural-domain logits, unscaled, added to the softmax denominator without a value. 16-bit
        sinks are converted to fp32 at every call, by one small kernel.
    q_scale, kv_scale : float or fp32 tensor of one element
        As above; natural domain.
    sliding_win_size : int
        Number of tokens that a row attends to, including its own; unlimited if 0 or less.
    kv_layout : str
        ``NHD`` or ``HND``.
    sm_count : int
        Ignored; the kernels use all SMs.
    enable_pdl : bool
        Whether to use programmatic dependent launch; None means yes where the GPU supports it.
    rcp_out_scale : float
        Multiplies an e4m3 output, and no other.
    q_seq_len : int
        Query tokens of every request; with ``q_cu_seq_lens`` the maximum, 2 or more.
    mask : uint16 [batch, q_seq_len, ceil(q_seq_len / 32) * 2], or [tokens, ...]
        The drafts that each query token attends to; None means causal.
    q_cu_seq_lens : int32 or uint32 [batch + 1]
        Offsets of the requests' query tokens, for ragged queries.
    k_sf_cache, v_sf_cache : e4m3 or uint8 [..., head_dim / 16]
        One scale for 16 elements of an NVFP4 cache, in the layout of the caches.
    lse : fp32 [tokens, heads], or as q without head_dim
        Written if given: the logarithm of the softmax denominator, including the sink. A fully
        masked row has its sink, or minus infinity without one.
    lse_base : str
        ``base2`` or ``basee``: log2 or natural logarithm.
    causal : bool
        False: every query token attends to all ``seq_len`` tokens, without ``mask`` and a window.

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
    check_scale_caches(k_sf_cache, v_sf_cache)
    sizes = {"num_kv_heads": num_kv_heads, "page_size": page_size}
    check_caches(k_cache, v_cache, kv_layout=kv_layout, **sizes)
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
        names=_XQA_NAMES,
    )
