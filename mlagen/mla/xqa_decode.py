"""Paged MLA decode by the signature of XQA in ``flashinfer.mla``."""

from __future__ import annotations

import torch

from mlagen.api.arguments import plain_pdl
from mlagen.api.mla_args import MlaArgs
from mlagen.api.mla_call import run_mla
from mlagen.api.op_outputs import mla_outputs
from mlagen.api.traced import as_op, is_compiling, is_traced, traceable
from mlagen.mla.trtllm_keywords import one_tensor


@traceable(lambda given: mla_outputs(given)[:1])
def xqa_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
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
) -> torch.Tensor:
    """Decode one step of multi-head latent attention over a paged cache.

    As :func:`mlagen.mla.trtllm_batch_decode_with_kv_cache_mla`, which says what each argument may
    be; the scores are multiplied by ``bmm1_scale`` alone here too.

    Parameters
    ----------
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim
        As there, the query in its form of four dimensions.
    block_tables, seq_lens, max_seq_len, out, bmm1_scale, bmm2_scale, sinks, enable_pdl
        As there.

    Returns
    -------
    torch.Tensor
        ``out``; made if None, as ``[batch, q_len, heads, kv_lora_rank]``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; nothing has been launched or written then.
    UnsupportedError
        If no kernel covers dtype or dimensions.
    CaptureError
        If the kernel is not loaded yet and a CUDA graph is being captured.

    Notes
    -----
    Signature of ``flashinfer.decode.xqa_batch_decode_with_kv_cache_mla``, which multiplies the
    scores by ``bmm1_scale * bmm2_scale``.
    """
    if is_compiling() or is_traced():
        first = (query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank)
        second = (qk_rope_head_dim, block_tables, seq_lens, max_seq_len, out, bmm1_scale)
        third = (bmm2_scale, sinks, enable_pdl)
        return as_op("xqa_batch_decode_with_kv_cache_mla", *first, *second, *third)  # type: ignore[no-any-return]
    args = MlaArgs(
        query,
        kv_cache,
        workspace_buffer,
        kv_lora_rank,
        qk_rope_head_dim,
        block_tables,
        seq_lens,
        max_seq_len,
        out,
        bmm1_scale,
        bmm2_scale,
        one_tensor(sinks),
    )
    return run_mla(args, plain_pdl(enable_pdl))[0]
