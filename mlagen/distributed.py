"""Decode context parallel over the GPUs of a process group.

The KV cache of a request is spread over the ranks, token by token: rank ``r`` of ``world`` has the
tokens ``r``, ``r + world``, ``r + 2 world`` and so on. Each rank has the queries of some heads.
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mlagen.cascade import States, combine_states
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
from mlagen.mla.trtllm import trtllm_batch_decode_with_kv_cache_mla
from mlagen.runtime.capture import is_capturing
from mlagen.settings import current_settings
from mlagen.torch_ops.traced import is_compiling, is_traced, require_eager_memory

__all__ = ["decode_cp", "local_seq_lens"]

# Shapes whose buffers are cached; those of one decode step are equal in all layers.
_CACHED_SHAPES = 4

_LSE_BYTES = 16  # of a row in a message; keeps outputs aligned
_REJECTED = 255  # every byte of the messages of a rank that rejects its arguments


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
    batch_invariant: bool | None = None,
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
    batch_invariant : bool
        As of that function; ranks are combined in the order of their numbers.

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
                batch_invariant=batch_invariant,
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
) -> _Exchange:
    """Return memory that no other call uses at the same time.

    Calls of one group and stream follow each other. A graph has memory of its own, in its pool.
    """
    rows, device = tuple(query.shape[:-2]), query.device
    facts = (rows, sizes, query.dtype, device)
    is_cached = not (is_compiling() or is_traced() or is_capturing(device))
    return _cached_exchange(facts, _user_of(device, group)) if is_cached else _new_exchange(*facts)


def _user_of(device: torch.device, group: dist.ProcessGroup | None) -> tuple[str, int]:
    known = dist.group.WORLD if group is None else group
    assert known is not None, "it has a size"
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return known.group_name, stream


@lru_cache(maxsize=_CACHED_SHAPES)
def _cached_exchange(facts: tuple[Any, ...], _user: tuple[str, int]) -> _Exchange:
    """Return the memory of a group and stream; a call at known addresses is a replay."""
    with torch.inference_mode(mode=False):
        return _new_exchange(*facts)


class _Exchange(NamedTuple):
    """What the ranks exchange in a call, and views of it in the layouts of the kernels.

    Its memory is rank by rank and head by head, so that a message to a rank is contiguous.
    """

    gathered: torch.Tensor  # bytes [world * heads, ..., row], of all ranks; none if they are given
    query: torch.Tensor  # its view [..., world * heads, head_dim_qk]
    out: torch.Tensor  # [..., world * heads, kv_lora_rank], over the tokens of this rank
    lse: torch.Tensor  # [tokens, world * heads]
    sent: torch.Tensor  # bytes [world * heads, tokens, row]: an output row, and its LSE
    received: torch.Tensor  # the same of this rank's heads
    computed: States  # views of out and lse
    nothing: States
    messages: States  # views of sent
    first: States  # views of received: of rank 0
    others: States  # of the other ranks, [tokens, world - 1, heads, ...]

    def gather(self, query: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Return the queries of the heads of all ranks."""
        own = query.movedim(-2, 0).contiguous()
        # As bytes, since no backend has collectives of every dtype. The newer name of the same one.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(self.gathered, own.view(torch.uint8), group=group)
        return self.query

    def pack(self) -> None:
        """Copy the results over the tokens of this rank into messages."""
        # A copy: without other states the first one stays as it is.
        combine_states(self.computed, self.nothing, "base2", into=self.messages)

    def combine(self, base: str, group: dist.ProcessGroup | None) -> States:
        """Send each rank the results of its heads, and return those of this rank, combined.

        Raises ArgumentError if another rank rejected the call, and reading the messages waits for
        no GPU, or ``MLAGEN_CHECK=1`` allows it.
        """
        is_eager = not (is_compiling() or is_traced())
        dist.all_to_all_single(self.received, self.sent, group=group)
        if is_eager and (self.out.device.type == "cpu" or current_settings().checks_contents):
            self._require_results()
        out, lse = combine_states(self.first, self.others, base)
        return States(out.view(*self.out.shape[:-2], *out.shape[1:]), lse)

    def reject(self, group: dist.ProcessGroup | None) -> None:
        """Send each rank that this one has no results: they wait for its messages.

        The message is NaN in every format, and no result of a kernel, which has another NaN.
        """
        with suppress(RuntimeError):  # the error of this rank matters more
            dist.all_to_all_single(self.received, self.sent.fill_(_REJECTED), group=group)

    def _require_results(self) -> None:
        world = 1 + self.others.out.shape[1]
        messages = self.received.view(world, self.received.numel() // world)
        rejected = (messages == _REJECTED).all(dim=1).nonzero()[:, 0].tolist()
        is_valid = not rejected or not messages.numel()  # a call of no tokens has empty messages
        require(is_valid, "group", "results of every rank", f"an error on ranks {rejected}")


def _new_exchange(
    rows: tuple[int, ...],
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> _Exchange:
    """Return memory for queries ``[*rows, heads, head_dim_qk]``; ``sizes`` are their others."""
    heads, head_dim_qk, kv_lora_rank, world = sizes
    tokens, all_heads = math.prod(rows), world * heads
    out_dtype = dtype if dtype.itemsize == 2 else torch.bfloat16
    out_bytes = kv_lora_rank * out_dtype.itemsize
    lse_offset = -(-out_bytes // _LSE_BYTES) * _LSE_BYTES

    def empty(*shape: int, of: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device=device)

    def states(rows: torch.Tensor) -> States:
        lse = rows[..., lse_offset:].view(torch.float32)[..., 0]
        return States(rows[..., :out_bytes].view(out_dtype), lse)

    query = empty(all_heads, *rows, head_dim_qk, of=dtype)
    out = empty(*rows, all_heads, kv_lora_rank, of=out_dtype)
    lse = empty(tokens, all_heads, of=torch.float32)
    sent, received = (empty(all_heads, tokens, lse_offset + _LSE_BYTES) for _ in range(2))
    by_rank = received.view(world, heads, *received.shape[1:]).permute(2, 0, 1, 3)
    computed = States(out.view(tokens, all_heads, kv_lora_rank), lse)
    return _Exchange(
        gathered=query.view(torch.uint8),
        query=query.movedim(0, -2),
        out=out,
        lse=lse,
        sent=sent,
        received=received,
        computed=computed,
        nothing=States(computed.out[:, None][:, :0], lse[:, None][:, :0]),
        messages=states(sent.transpose(0, 1)),
        first=states(by_rank[:, 0]),
        others=states(by_rank[:, 1:]),
    )
