"""Decode context parallel over the GPUs of a process group.

The KV cache of a request is spread over the ranks, token by token: rank ``r`` of ``world`` has the
tokens ``r``, ``r + world``, ``r + 2 world`` and so on. Each rank has the queries of some heads.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from mlagen.families.common.arguments import (
    FLOAT_DTYPES,
    require,
    require_dims,
    require_dtype,
    require_flag,
    require_index,
    require_shape,
    require_tensor,
    require_whole_number,
)
from mlagen.mla.dcp_exchange import Exchange, new_exchange
from mlagen.mla.trtllm import trtllm_batch_decode_with_kv_cache_mla
from mlagen.runtime.capture import is_capturing
from mlagen.torch_ops.traced import is_compiling, is_traced, require_eager_memory

__all__ = ["decode_cp", "local_seq_lens"]

# Shapes whose buffers are cached; those of one decode step are equal in all layers.
_CACHED_SHAPES = 4


def local_seq_lens(seq_lens: torch.Tensor, cp_world: int, cp_rank: int) -> torch.Tensor:
    """Return how many tokens of each request a rank has, from the lengths on all ranks.

    Parameters
    ----------
    seq_lens : int32 or uint32 [batch]
        Tokens of the requests.
    cp_world, cp_rank : int
        The number of ranks, and the rank.

    Returns
    -------
    torch.Tensor
        int32 ``[batch]``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule.
    """
    world = require_whole_number(cp_world, "cp_world", min_value=1)
    rank = require_whole_number(cp_rank, "cp_rank")
    require(rank < world, "cp_rank", f"less than {world} (cp_world)", rank)
    require_eager_memory(seq_lens=seq_lens)
    require_dims(require_tensor(seq_lens, "seq_lens"), "seq_lens", (1,))
    require_index(seq_lens, "seq_lens", seq_lens.device)
    lengths = seq_lens.view(torch.int32)
    return lengths // world + (lengths % world > rank)


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
    query_has_all_heads: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Decode one step of MLA over a KV cache that the ranks of a process group share.

    Every rank gathers the queries of all heads, computes them over its own tokens, and sends each
    rank the results of that rank's heads, which it combines. All ranks call it with the same
    requests, query tokens and number of heads. It does not synchronize with the device, and a CUDA
    graph may capture it after one call outside of the capture.

    A call runs an all-gather, the decode, a kernel that copies the partial outputs with their LSE
    into messages, an all-to-all, and a kernel that combines the ranks. Queries that are not head by
    head in memory need a copy before, and sinks two small kernels. One rank has the decode only.

    Partial outputs keep the 16-bit dtype of the decode kernel. Their rounding adds an error of at
    most ``u * sum(w[r] * abs(out[r]))``, with the weights ``w[r]`` of the ranks, which add up to 1,
    and ``u`` of 2^-8 in bf16 and 2^-11 in fp16, to that of the result, ``u * abs(out)``.

    Parameters
    ----------
    query : bf16, fp16 or e4m3 [batch, q_len, heads, head_dim_qk], or [tokens, heads, head_dim_qk]
        Queries of this rank's heads; the heads of all ranks are 256 at most. With one query token,
        or with heads as the first dimension in memory, as a batched GEMM with the weights of each
        head leaves them, the all-gather reads them where they are.
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
    query_has_all_heads : bool
        Whether ``query`` has the heads of all ranks, rank by rank: the all-gather is omitted.

    Returns
    -------
    torch.Tensor
        ``out``, or ``(out, lse)``, of this rank's heads.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule. What the sizes of messages follow from is rejected before an
        exchange: ``query``, ``kv_lora_rank``, ``qk_rope_head_dim``, ``query_has_all_heads`` and
        ``group``; the other ranks wait until this one calls again, or for the timeout of the group.
        Of any other error of a rank the messages tell the others, so that the next calls
        pair: they raise on the CPU and with ``MLAGEN_CHECK=1``, and otherwise return NaN.
    """
    require_eager_memory(query=query)
    require_dims(require_tensor(query, "query"), "query", (3, 4))
    kv_lora_rank = require_whole_number(kv_lora_rank, "kv_lora_rank")
    is_whole = require_flag(query_has_all_heads, "query_has_all_heads")
    is_group = group is None or isinstance(group, dist.ProcessGroup)
    require(is_group, "group", "a torch.distributed.ProcessGroup", type(group).__name__)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    heads = query.shape[-2]
    if is_whole:
        require(heads % world == 0, "query.shape[-2]", f"a multiple of {world} (ranks)", heads)
        heads //= world
    width = kv_lora_rank + require_whole_number(qk_rope_head_dim, "qk_rope_head_dim")
    rule = f"{width} (kv_lora_rank + qk_rope_head_dim)"
    require(query.shape[-1] == width, "query.shape[-1]", rule, query.shape[-1])
    require_dtype(query, "query", tuple(FLOAT_DTYPES))
    sizes = (heads, 0 if is_whole else width, kv_lora_rank, world)
    exchange = _exchange_of(query, sizes, group) if world > 1 else None
    with torch.no_grad():
        if exchange is not None and not is_whole:
            query = exchange.gather(query, group)
        try:
            return_lse = require_flag(return_lse, "return_lse")
            require_dims(query, "query", (4,) if cum_seq_lens_q is None else (3,))
            if sinks is not None:
                sinks = _sinks_of_all(sinks, heads, world, rank)
            out, lse = trtllm_batch_decode_with_kv_cache_mla(
                query=query,
                kv_cache=kv_cache,
                workspace_buffer=workspace_buffer,
                qk_nope_head_dim=qk_nope_head_dim,
                kv_lora_rank=kv_lora_rank,
                qk_rope_head_dim=qk_rope_head_dim,
                block_tables=block_tables,
                seq_lens=seq_lens,
                max_seq_len=max_seq_len,
                sparse_mla_top_k=sparse_mla_top_k,
                out=None if exchange is None else exchange.out,
                bmm1_scale=bmm1_scale,
                bmm2_scale=bmm2_scale,
                sinks=sinks,
                sparse_mla_top_k_lens=sparse_mla_top_k_lens,
                lse=None if exchange is None else exchange.lse,
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
            if exchange is not None:
                exchange.pack()
        except Exception:
            if exchange is not None:
                exchange.reject(group)
            raise
        if exchange is not None:
            out, lse = exchange.combine(return_lse_base, group)
    return (out, lse) if return_lse else out


def _sinks_of_all(sinks: object, heads: int, world: int, rank: int) -> torch.Tensor:
    """Return sinks of the heads of all ranks: minus infinity for others, as each counts once."""
    require_eager_memory(sinks=sinks)
    own = require_tensor(sinks, "sinks")
    require_shape(own, "sinks", ((heads,),), "heads of this rank")
    others = (rank * heads, (world - 1 - rank) * heads)
    return torch.nn.functional.pad(own, others, value=-math.inf)


def _exchange_of(
    query: torch.Tensor, sizes: tuple[int, int, int, int], group: dist.ProcessGroup | None
) -> Exchange:
    """Return memory that no other call uses at the same time.

    Calls of one group and stream follow each other. A graph has memory of its own, in its pool.
    """
    rows, device = tuple(query.shape[:-2]), query.device
    facts = (rows, sizes, query.dtype, device)
    is_cached = not (is_compiling() or is_traced() or is_capturing(device))
    return _cached_exchange(facts, _user_of(device, group)) if is_cached else new_exchange(*facts)


def _user_of(device: torch.device, group: dist.ProcessGroup | None) -> tuple[str, int]:
    known = dist.group.WORLD if group is None else group
    assert known is not None, "it has a size"
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return known.group_name, stream


@lru_cache(maxsize=_CACHED_SHAPES)
def _cached_exchange(facts: tuple[Any, ...], _user: tuple[str, int]) -> Exchange:
    """Return the memory of a group and stream; a call at known addresses is a replay."""
    with torch.inference_mode(mode=False):
        return new_exchange(*facts)
