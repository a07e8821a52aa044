"""Paged MLA decode with the signatures of XQA, in ``flashinfer.mla`` and ``flashinfer.xqa``."""

from __future__ import annotations

import torch

from mlagen.entry_point import NOTHING, OUT, entry_point
from mlagen.families.common.arguments import (
    FLOAT_DTYPES,
    chooses_batch_invariant,
    is_pdl_enabled,
    reject,
    require,
    require_dims,
    require_dtype,
    require_strides,
    require_tensor,
    require_whole_number,
    unwrap_sinks,
)
from mlagen.families.common.memory import require_memory, require_plain
from mlagen.families.common.xqa_arguments import check_unused, require_size, table_capacity
from mlagen.families.dispatch import MLA
from mlagen.families.mla.args import MlaArgNames, MlaArgs
from mlagen.torch_ops.outputs import mla_output, unused_by_xqa, xqa_mla_output
from mlagen.torch_ops.traced import Op


@entry_point(
    MLA,
    outputs="out",
    returns=OUT,
    ignored="qk_nope_head_dim",
    length="max_seq_len",
    op=Op(output=mla_output),
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
    *,
    batch_invariant: bool | None = None,
) -> MlaArgs:
    """Decode one step of multi-head latent attention over a paged KV cache.

    As :func:`mlagen.mla.trtllm_batch_decode_with_kv_cache_mla`, which documents the arguments; only
    ``bmm1_scale`` multiplies the scores, as there.

    Parameters
    ----------
    query : bf16, fp16 or e4m3 [batch, q_len, heads, head_dim_qk]
        As there, without the ragged layout.
    kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables
        As there, without ``sparse_mla_top_k``.
    seq_lens, max_seq_len, out, bmm1_scale, bmm2_scale, sinks, enable_pdl, batch_invariant
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
        batch_invariant=chooses_batch_invariant(batch_invariant),
    )


_KV_LORA_RANK = 512
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
    op=Op(output=xqa_mla_output, constants=unused_by_xqa),
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
    *,
    batch_invariant: bool | None = None,
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
    semaphores : uint32 or int32
        Accepted for compatibility; ignored and unchanged, of any size and content.
    page_size : int
        As in the caches.
    q_scale, kv_scale : float or fp32 tensor of one element
        As above; natural domain.
    sm_count : int
        Ignored; the kernels use all SMs.
    workspace_buffer, enable_pdl, batch_invariant
        As for :func:`mlagen.mla.trtllm_batch_decode_with_kv_cache_mla`.

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
    is_separate = _check_caches(q, k_cache, v_cache, page_size=page_size)
    return MlaArgs(
        query=q,
        kv_cache=k_cache,
        workspace_buffer=workspace_buffer,
        kv_lora_rank=_KV_LORA_RANK,
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
        batch_invariant=chooses_batch_invariant(batch_invariant),
        names=_NAMES,
    )


def _check_caches(q: object, k_cache: object, v_cache: object, *, page_size: object) -> bool:
    """Return whether keys and values are separate in memory."""
    query = require_tensor(q, "q")
    require_plain(query, "q")
    require_dims(query, "q", (4,))
    require_dtype(query, "q", tuple(FLOAT_DTYPES))
    require(query.shape[1] == 1, "q.shape[1]", 1, query.shape[1])
    keys, values = require_tensor(k_cache, "k_cache"), require_tensor(v_cache, "v_cache")
    require_memory(keys, "k_cache")
    require_memory(values, "v_cache")
    require_dims(keys, "k_cache", (3, 4))
    allowed = (query.dtype, torch.float8_e4m3fn)
    if keys.dtype not in allowed:
        require_dtype(keys, "k_cache", tuple(dict.fromkeys(allowed)), "that of q, or e4m3")
    # The product covers the axis of size 1 both before and after the tokens.
    require_size(page_size, "page_size", keys.shape[1] * (keys.shape[2] if keys.dim() == 4 else 1))
    if values.data_ptr() != keys.data_ptr() or values.device != keys.device:
        return True
    # The same memory; values may be a view of the first elements of each token.
    require_dtype(values, "v_cache", (keys.dtype,), "dtype of k_cache")
    if values.shape[:-1] != keys.shape[:-1]:
        reject("v_cache.shape[:-1]", list(keys.shape[:-1]), list(values.shape[:-1]))
    require_strides(values, "v_cache", keys, "k_cache")
    require(keys.shape[-1] >= _KV_LORA_RANK, "k_cache.shape[-1]", "576", keys.shape[-1])
    if not _KV_LORA_RANK <= values.shape[-1] <= keys.shape[-1]:
        rule = f"{_KV_LORA_RANK} to {keys.shape[-1]} (width of k_cache)"
        reject("v_cache.shape[-1]", rule, values.shape[-1])
    return False


def flat_lengths(seq_lens: torch.Tensor) -> torch.Tensor:
    """Return ``[batch]`` for ``[batch, 1]``; anything else unchanged."""
    require_memory(seq_lens, "seq_lens")
    if not isinstance(seq_lens, torch.Tensor) or seq_lens.dim() != 2:
        return seq_lens
    return seq_lens[:, 0] if seq_lens.shape[1] == 1 else seq_lens
