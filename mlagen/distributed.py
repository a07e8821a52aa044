"""Decode context parallel over the GPUs of a process group.

The KV cache of a request is spread over the ranks, token by token: rank ``r`` of ``world`` has the
tokens ``r``, ``r + world``, ``r + 2 world`` and so on. Each rank has the queries of some heads.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from mlagen.cascade import merge_states
from mlagen.families.common.arguments import require_dims, require_tensor
from mlagen.mla.trtllm import trtllm_batch_decode_with_kv_cache_mla

__all__ = ["decode_cp", "local_seq_lens"]

_LSE_BYTES = 16  # of a row in a message; keeps outputs aligned


def local_seq_lens(seq_lens: torch.Tensor, cp_world: int, cp_rank: int) -> torch.Tensor:
    """Return how many tokens of each request a rank has, from the lengths on all ranks.

    Parameters
    ----------
    seq_lens : int32 [batch]
        Tokens of the requests.
    cp_world, cp_rank : int
        The number of ranks, and the rank.

    Returns
    -------
    torch.Tensor
        int32 ``[batch]``.
    """
    return (seq_lens + (cp_world - 1 - cp_rank)) // cp_world


def decode_cp(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    causal_seqlens_kv_global: torch.Tensor,
    *,
    sparse_mla_top_k: int = 0,
    sparse_mla_top_k_lens: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    enable_pdl: bool | None = None,
    return_lse: bool = False,
    return_lse_base: str = "base2",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Decode one step of MLA over a KV cache that the ranks of a process group share.

    Every rank gathers the queries of all heads, computes them over its own tokens, and sends each
    rank the results of that rank's heads, which it combines. All ranks call it with the same
    requests, query tokens and number of heads. It does not synchronize with the device.

    Parameters
    ----------
    query : bf16, fp16 or e4m3 [batch, q_len, heads, head_dim_qk], or [tokens, heads, head_dim_qk]
        Queries of this rank's heads; the heads of all ranks are 256 at most.
    kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim
        As of :func:`mlagen.mla.trtllm_batch_decode_with_kv_cache_mla`.
    block_tables, seq_lens, max_seq_len
        Pages and lengths of this rank's tokens; see :func:`local_seq_lens`.
    causal_seqlens_kv_global : int32 [batch]
        Tokens of the requests on all ranks, including the new ones.
    sparse_mla_top_k, sparse_mla_top_k_lens
        With ``sparse_mla_top_k``, ``block_tables`` has the top-k indices that this rank has.
    bmm1_scale, bmm2_scale, cum_seq_lens_q, max_q_len, enable_pdl
        As of that function.
    sinks : fp32 [heads]
        Those of this rank's heads.
    return_lse : bool
        Whether to return ``(out, lse)``.
    return_lse_base : str
        ``base2`` or ``basee``: log2 or natural logarithm.
    group : torch.distributed.ProcessGroup
        The ranks; all processes if None.

    Returns
    -------
    torch.Tensor
        ``out``, or ``(out, lse)``, of this rank's heads.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule.
    """
    query = require_tensor(query, "query")
    require_dims(query, "query", (4,) if cum_seq_lens_q is None else (3,))
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    heads, rows = query.shape[-2], query.shape[:-2]
    out, lse = trtllm_batch_decode_with_kv_cache_mla(
        query=_with_all_heads(query, world, group),
        kv_cache=kv_cache,
        workspace_buffer=workspace_buffer,
        qk_nope_head_dim=qk_nope_head_dim,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=max_seq_len,
        sparse_mla_top_k=sparse_mla_top_k,
        sparse_mla_top_k_lens=sparse_mla_top_k_lens,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=None if sinks is None else _own_sinks(sinks, world, rank),
        cum_seq_lens_q=cum_seq_lens_q,
        max_q_len=max_q_len,
        enable_pdl=enable_pdl,
        return_lse=True,
        return_lse_base=return_lse_base,
        enable_dcp=True,
        cp_world=world,
        cp_rank=rank,
        causal_seqlens_kv_global=causal_seqlens_kv_global,
    )
    partial_out, partial_lse = _exchange(
        out.view(-1, world, heads, kv_lora_rank), lse.view(-1, world, heads), group
    )
    combined, combined_lse = merge_states(partial_out, partial_lse, base=return_lse_base)
    combined = combined.view(*rows, heads, kv_lora_rank)
    return (combined, combined_lse) if return_lse else combined


def _with_all_heads(
    query: torch.Tensor, world: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the queries of the heads of all ranks, rank by rank."""
    own = query.contiguous().view(torch.uint8)  # no backend has collectives of every dtype
    *rows, heads, width = own.shape
    gathered = own.new_empty(world * rows[0], *own.shape[1:])
    # The newer name of the same collective.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, own, group=group)
    by_rank = gathered.view(world, *own.shape)
    return by_rank.movedim(0, -3).reshape(*rows, world * heads, width).view(query.dtype)


def _own_sinks(sinks: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    """Return sinks of all heads, minus infinity for those of other ranks: each counts once."""
    by_rank = sinks.new_full((world, len(sinks)), -math.inf)
    by_rank[rank] = sinks
    return by_rank.view(-1)


def _exchange(
    out: torch.Tensor, lse: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send each rank the results of its heads.

    Takes ``out[tokens, world, heads, dim]`` and ``lse[tokens, world, heads]`` of all ranks' heads,
    and returns the same with ``world`` as the source, of this rank's heads.
    """
    tokens, world, heads, dim = out.shape
    out_bytes = dim * out.element_size()
    shape = (world, tokens, heads, out_bytes + _LSE_BYTES)
    sent = torch.empty(shape, dtype=torch.uint8, device=out.device)
    received = torch.empty_like(sent)
    _out_of(sent, out.dtype, out_bytes).copy_(out.transpose(0, 1))
    _lse_of(sent, out_bytes).copy_(lse.transpose(0, 1))
    dist.all_to_all_single(received, sent, group=group)
    partial_out = _out_of(received, out.dtype, out_bytes)
    return partial_out.transpose(0, 1), _lse_of(received, out_bytes).transpose(0, 1)


def _out_of(message: torch.Tensor, dtype: torch.dtype, out_bytes: int) -> torch.Tensor:
    return message[..., :out_bytes].view(dtype)


def _lse_of(message: torch.Tensor, out_bytes: int) -> torch.Tensor:
    return message[..., out_bytes:].view(torch.float32)[..., 0]
