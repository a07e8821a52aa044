"""Paged MLA decode with the signature of XQA in ``flashinfer.mla``."""

from __future__ import annotations

import torch

from mlagen.entry_point import OUT, entry_point
from mlagen.families.common.arguments import is_pdl_enabled, unwrap_sinks
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.dispatch import MLA
from mlagen.torch_ops.outputs import mla_outputs
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
