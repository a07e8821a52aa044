"""Paged MLA decode with the signatures of XQA, in ``flashinfer.mla`` and ``flashinfer.xqa``."""

from __future__ import annotations

import torch

from mlagen.entry_point import NOTHING, OUT, entry_point
from mlagen.families.common.arguments import (
    is_pdl_enabled,
    require_tensor,
    require_whole_number,
    unwrap_sinks,
)
from mlagen.families.common.xqa_arguments import (
    MLA_KV_LORA_RANK,
    check_mla_caches,
    check_unused,
    flat_lengths,
    table_capacity,
)
from mlagen.families.dispatch import MLA
from mlagen.families.mla.args import MlaArgNames, MlaArgs
from mlagen.torch_ops.outputs import mla_outputs, unused_by_xqa, xqa_mla_outputs
from mlagen.torch_ops.traced import Op


@entry_point(
    MLA,
    outputs="out",
    returns=OUT,
    ignored="qk_nope_head_dim",
    length="max_seq_len",
    op=Op(outputs=lambda given: mla_outputs(given)[:1]),
)
def xqa_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,  # noqa: ARG001 - any dimension before absorption
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    enable_pdl: bool | None = None,
) -> MlaArgs:
    """Decode one step of multi-head latent attention over a paged KV cache.

    As :func:`mlagen.mla.trtllm_batch_decode_with_kv_cache_mla`, which documents the arguments; only
    ``bmm1_scale`` multiplies the scores, as there.

    Parameters
    ----------
    query : bf16, fp16 or e4m3 [batch, q_len, heads, head_dim_qk]
        As there, without the ragged layout.
    kv_cache, workspace_buffer : torch.Tensor
        As there.
    qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim : int
        As there.
    block_tables, seq_lens : torch.Tensor
        As there, without ``sparse_mla_top_k``.
    max_seq_len : int
        As there.
    out : torch.Tensor
        As there.
    bmm1_scale, bmm2_scale : float or fp32 tensor of one element
        As there.
    sinks : fp32, bf16 or fp16 [heads]
        As there.
    enable_pdl : bool
        As there.

    Returns
    -------
    torch.Tensor
        ``out``; allocated if None, as ``[batch, q_len, heads, kv_lora_rank]``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; no kernel is launched, and the outputs are unchanged.
    UnsupportedError
        If no kernel supports dtype or dimensions.
    CaptureError
        If the kernel is not loaded yet during CUDA graph capture.

    Notes
    -----
    Signature of ``flashinfer.decode.xqa_batch_decode_with_kv_cache_mla``, which multiplies the
    scores by ``bmm1_scale * bmm2_scale``.
    """
    return MlaArgs(
        query=query,
        kv_cache=kv_cache,
        workspace_buffer=workspace_buffer,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=max_seq_len,
        out=out,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=unwrap_sinks(sinks),
        enable_pdl=is_pdl_enabled(enable_pdl),
    )


_NAMES = MlaArgNames(
    query="q",
    query_rope="q",
    kv_cache="k_cache",
    rope_cache="k_cache",
    block_tables="page_table",
    out="output",
    bmm1_scale="q_scale",
    bmm2_scale="kv_scale",
)


@entry_point(
    MLA,
    outputs="output",
    returns=NOTHING,
    op=Op(outputs=xqa_mla_outputs, constants=unused_by_xqa),
)
def xqa_mla(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor,
    page_size: int,
    q_scale: float | torch.Tensor = 1.0,
    kv_scale: float | torch.Tensor = 1.0,
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
) -> MlaArgs:
    """Decode one token of each request by multi-head latent attention, into ``output``.

    The scores are ``q_scale * kv_scale * (Q K^T)``, without a factor of the head dimension, and the
    output is ``kv_scale * (P V)``. A request without tokens gives zeros.

    Parameters
    ----------
    q : e4m3, bf16 or fp16 [batch, 1, heads, 576]
        Absorbed queries, the 512 latent elements first. 1 to 256 heads.
    k_cache : as q, or e4m3 [pages, page_size, 1, 576], [pages, 1, page_size, 576], or without the 1
        The paged latent cache, with any strides that are multiples of 16 bytes.
    v_cache : as k_cache
        The same memory, or separate memory of the same shape and strides; the first 512 elements of
        a token are its value.
    page_table : int32 or uint32 [batch, max_pages]
        Page ids, for keys and values; entries from ``ceil(seq_len / page_size)`` on are never read.
        The width affects the scheduling, not the result.
    seq_lens : int32 or uint32 [batch, 1] or [batch]
        Tokens in the cache, including the new one.
    output : bf16 for an e4m3 query, else as q [batch, 1, heads, 512]
        Written.
    workspace_buffer : any dtype
        Scratch of at least :func:`mlagen.workspace_bytes` bytes; a call uses its end. It needs no
        initial value.
    semaphores : uint32 or int32
        Accepted for compatibility; ignored and unchanged, of any size and content.
    page_size : int
        As in the caches.
    q_scale, kv_scale : float or fp32 tensor of one element
        As above; natural domain.
    sm_count : int
        Ignored; the kernels use all SMs.
    enable_pdl : bool
        Whether to use programmatic dependent launch; None means yes where the GPU supports it.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; no kernel is launched, and the outputs are unchanged.
    UnsupportedError
        If no kernel supports the dtypes or dimensions.
    CaptureError
        If the kernel is not loaded yet during CUDA graph capture.

    Notes
    -----
    Signature of ``flashinfer.xqa.xqa_mla``.
    """
    page_size = require_whole_number(page_size, "page_size", min_value=1)
    check_unused(q, semaphores, sm_count)
    require_tensor(output, "output")
    is_separate = check_mla_caches(q, k_cache, v_cache, page_size=page_size)
    return MlaArgs(
        query=q,
        kv_cache=k_cache,
        workspace_buffer=workspace_buffer,
        kv_lora_rank=MLA_KV_LORA_RANK,
        qk_rope_head_dim=64,
        block_tables=page_table,
        seq_lens=flat_lengths(seq_lens),
        max_seq_len=table_capacity(page_table, page_size),
        out=output,
        bmm1_scale=q_scale,
        bmm2_scale=kv_scale,
        bmm2_scales_scores=True,
        value_cache=v_cache if is_separate else None,
        enable_pdl=is_pdl_enabled(enable_pdl),
        names=_NAMES,
    )
