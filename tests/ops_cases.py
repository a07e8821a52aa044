"""One call per entry point, as a function of tensors for use inside compiled code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import mlagen
from mlagen.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    trtllm_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from mlagen.mla import (
    BatchMLAPagedAttentionWrapper,
    CausalPaddingMask,
    ChunkedMask,
    MaterializedMask,
    MLAPlanMetadata,
    OrMask,
    SlidingWindowCausalMask,
    flare_mla_decoding,
    trtllm_batch_decode_sparse_mla_dsv4,
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)
from mlagen.xqa import xqa, xqa_mla

BATCH, PAGES, HEADS = 4, 16, 16
MLA_SCALE, GQA_SCALE = 192**-0.5, 64**-0.5


@dataclass
class Tensors:
    """Tensors of the calls, on one device."""

    device: str
    made: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Allocate the tensors, from a fixed seed."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.device, dtype)

        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        self.made = {
            "query": normal(BATCH, 1, HEADS, 576),
            "cache": normal(PAGES, 64, 576),
            "keys": normal(PAGES, 16, 2, 64),
            "values": normal(PAGES, 16, 2, 64),
            "gqa_query": normal(BATCH, HEADS, 64),
            "sinks": normal(HEADS, dtype=torch.float32),
            "dense_keys": normal(BATCH, 30, 1, 576),
            "bias": normal(BATCH, 1, 256, dtype=torch.float32),
            "table": ints(*range(PAGES)).view(BATCH, 4),
            "lengths": ints(1, 17, 40, 64),
            "pool": torch.full((PAGES, 64, 584), 0x30, dtype=torch.uint8, device=self.device),
            "ones": ints(1, 1, 1, 1),
            "scale": torch.full((1,), MLA_SCALE, device=self.device),
            "workspace": torch.empty(64 << 20, dtype=torch.uint8, device=self.device),
        }

    def __getattr__(self, name: str) -> torch.Tensor:
        """Return a tensor by name."""
        if name in self.__dict__.get("made", {}):
            return self.made[name]
        raise AttributeError(name)


# Each takes its tensors and the query, so that both can be graph inputs.
Call = Callable[[Tensors, torch.Tensor], Any]


def mla(of: Tensors, query: torch.Tensor | tuple[torch.Tensor, torch.Tensor], **others: Any) -> Any:
    """Call the entry point with TensorRT-LLM's signature."""
    call = {"bmm1_scale": MLA_SCALE, **others}
    return trtllm_batch_decode_with_kv_cache_mla(
        query, of.cache, of.workspace, 128, 512, 64, of.table, of.lengths, 64, **call
    )


def dsv4(of: Tensors, query: torch.Tensor, **others: Any) -> Any:
    """Call the entry point over two pools, which are one tensor here."""
    lists = {"sparse_indices": of.table, "swa_topk_lens": of.ones}
    if others.pop("has_extra", False):
        lists |= {"extra_sparse_indices": of.table, "extra_sparse_topk_lens": of.ones}
        others["compressed_kv_cache"] = of.pool
    call = {"bmm1_scale": MLA_SCALE, **lists, **others}
    return trtllm_batch_decode_sparse_mla_dsv4(query[..., :512], of.pool, of.workspace, **call)


def msa(of: Tensors, query: torch.Tensor, **others: Any) -> Any:
    """Call the block-sparse GQA entry point, over a page of 128 tokens for each request."""
    pages = of.keys.view(2, 2, 128, 64)
    indices = of.table.new_zeros(2, BATCH, 1)
    given = {"page_table": of.ones[:, None], "seqused_k": of.lengths, **others}
    rows = query.flatten().view(-1, 16, 64)[:BATCH]
    return mlagen.msa_ops.msa_sparse_decode_attention(rows, pages, pages, indices, **given)


def qsa(of: Tensors, query: torch.Tensor, **others: Any) -> Any:
    """Call the token-sparse GQA entry point."""
    rows = query.flatten().view(-1, 16, 64)[:BATCH]
    return mlagen.sparse.qsa_sparse_paged_attention(
        rows, of.keys, of.values, of.table, of.table, of.ones, False, **others
    )


def gqa(of: Tensors, query: torch.Tensor, **others: Any) -> Any:
    """Call the GQA entry point."""
    caches = (of.keys, others.pop("values", of.values))
    call = {"bmm1_scale": GQA_SCALE, **others}
    return xqa_batch_decode_with_kv_cache(
        query, caches, of.workspace, of.table, of.lengths, 64, **call
    )


def trtllm_gqa(of: Tensors, query: torch.Tensor, **others: Any) -> Any:
    """Call the GQA entry point with TensorRT-LLM's signature."""
    call = {"bmm1_scale": GQA_SCALE, "q_len_per_req": 2, "kv_layout": "NHD", **others}
    caches = (of.keys, of.values)
    return trtllm_batch_decode_with_kv_cache(
        query, caches, of.workspace, of.table, of.lengths, 64, **call
    )


def _mla_of_xqa(of: Tensors, query: torch.Tensor) -> Any:
    return xqa_batch_decode_with_kv_cache_mla(
        query, of.cache, of.workspace, 128, 512, 64, of.table, of.lengths, 64, bmm1_scale=MLA_SCALE
    )


def _into(entry: Callable[..., None], *others: Any, like: torch.Tensor, width: int) -> torch.Tensor:
    out = like.new_empty((*like.shape[:-1], width))
    entry(like, *others[:4], out, *others[4:])
    return out


def _xqa(of: Tensors, query: torch.Tensor) -> Any:
    tensors = (of.keys, of.values, of.table, of.lengths)
    query = query.unsqueeze(1)
    return _into(xqa, *tensors, of.workspace, of.ones, 2, 16, like=query, width=64)


def xqa_mla_of(of: Tensors, query: torch.Tensor, lengths: torch.Tensor | None = None) -> Any:
    """Call ``xqa_mla``."""
    tensors = (of.cache, of.cache, of.table, of.lengths if lengths is None else lengths)
    return _into(xqa_mla, *tensors, of.workspace, of.ones, 64, MLA_SCALE, like=query, width=512)


def flare(of: Tensors, query: torch.Tensor, mask: Any) -> Any:
    """Call ``flare_mla_decoding`` over a paged cache."""
    paged = mlagen.PagedKVCache(of.cache, of.table, of.lengths - 1)
    return flare_mla_decoding(query, paged, mask, of.ones, scale=MLA_SCALE)


def planned(of: Tensors) -> BatchMLAPagedAttentionWrapper:
    """Return a wrapper with a plan of the tensors."""
    wrapper = BatchMLAPagedAttentionWrapper(of.workspace)
    ends = torch.arange(BATCH + 1, dtype=torch.int32)
    sizes = (HEADS, 512, 64, 64, True, MLA_SCALE, torch.bfloat16, torch.bfloat16)
    wrapper.plan(ends, ends * 4, of.table.flatten(), of.lengths.cpu(), *sizes)
    return wrapper


def declared(of: Tensors) -> BatchMLAPagedAttentionWrapper:
    """Return a wrapper whose plan of block tables declares all that a run may ask for."""
    wrapper = BatchMLAPagedAttentionWrapper(of.workspace)
    ends = torch.arange(BATCH + 1, dtype=torch.int32)
    wrapper.plan(
        metadata=MLAPlanMetadata.dense(ends, of.table.cpu(), of.lengths.cpu()),
        num_heads=HEADS,
        head_dim_ckv=512,
        head_dim_kpe=64,
        page_size=64,
        causal=True,
        sm_scale=1.0,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
        lse_mode="base2",
        output_dtype=torch.float8_e4m3fn,
        output_scale="per-tensor",
        scale_mode="bmm-scalar",
        use_sinks=True,
    )
    return wrapper


def planned_gqa(of: Tensors, **others: Any) -> BatchDecodeWithPagedKVCacheWrapper:
    """Return a wrapper with a plan of the GQA tensors."""
    wrapper = BatchDecodeWithPagedKVCacheWrapper(of.workspace)
    ends = torch.arange(BATCH + 1, dtype=torch.int32)
    tails = (of.lengths.cpu() - 1) % 16 + 1
    call = {"q_data_type": torch.bfloat16, **others}
    wrapper.plan(ends * 4, of.table.flatten(), tails, HEADS, 2, 64, 16, **call)
    return wrapper


def parts(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latent part and the rope part."""
    latent, rope = torch.split(whole, [512, 64], dim=-1)
    return latent, rope


def planless(of: Tensors, query: torch.Tensor, **others: Any) -> Any:
    """Run a wrapper that plans nothing."""
    wrapper = BatchMLAPagedAttentionWrapper(of.workspace, backend="cutlass")
    tensors = (*parts(query[:, 0]), *parts(of.cache))
    return wrapper.run(*tensors, kv_len=of.lengths, page_table=of.table, **others)


CALLS: dict[str, Call] = {
    "trtllm": mla,
    "trtllm, in parts": lambda of, q: mla(of, parts(q)),
    "trtllm, lse": lambda of, q: mla(of, q, return_lse=True, return_lse_base="basee"),
    "trtllm, scale in a tensor, sinks in a list": lambda of, q: mla(
        of, q, bmm1_scale=of.scale, sinks=[of.sinks]
    ),
    "trtllm, out without q_len": lambda of, q: mla(of, q, out=q[:, 0, :, :512].contiguous()),
    "trtllm, out and lse": lambda of, q: mla(of, q, out=q[..., :512].contiguous(), return_lse=True),
    "two pools": lambda of, q: dsv4(of, q, has_extra=True),
    "two pools, sinks, lse": lambda of, q: dsv4(
        of, q[:, 0], sinks=[of.sinks], bmm1_scale=of.scale, return_lse=True
    ),
    "two pools, out and lse": lambda of, q: dsv4(
        of, q, has_extra=True, out=q[..., :512].contiguous(), return_lse=True
    ),
    "block indices": msa,
    "block indices, lse": lambda of, q: msa(of, q, return_softmax_lse=True, softmax_scale=0.1),
    "token indices, gate": lambda of, q: qsa(
        of, q, output_gate=q.flatten()[: BATCH * 1024].view(BATCH, -1)
    ),
    "token indices, lse": lambda of, q: qsa(of, q, return_lse=True, k_scale=0.5),
    "xqa_batch_decode_with_kv_cache_mla": _mla_of_xqa,
    "xqa_batch_decode_with_kv_cache": lambda of, q: gqa(of, q.flatten(-2)[:, 0].view(-1, 144, 64)),
    "grouped queries, sinks, window": lambda of, q: gqa(
        of, q.flatten(-2)[:, 0].view(-1, 144, 64)[:, :HEADS], sinks=of.sinks, window_left=9
    ),
    "grouped queries, two tokens": lambda of, q: gqa(
        of, q.flatten().view(-1, 16, 64)[: 2 * BATCH], q_len_per_req=2
    ),
    "grouped queries, lse": lambda of, q: gqa(
        of, q.flatten().view(-1, 16, 64)[: 2 * BATCH], q_len_per_req=2, return_lse=True
    ),
    "trtllm_batch_decode_with_kv_cache": lambda of, q: trtllm_gqa(
        of, q.flatten().view(-1, 16, 64)[: 2 * BATCH], out_dtype=torch.bfloat16
    ),
    "trtllm_batch_decode_with_kv_cache, lse": lambda of, q: trtllm_gqa(
        of, q.flatten().view(-1, 16, 64)[: 2 * BATCH], sinks=[of.sinks], return_lse=True
    ),
    "grouped queries, values of fewer dims": lambda of, q: gqa(
        of, q.flatten().view(-1, 16, 64)[: 2 * BATCH], q_len_per_req=2, values=of.values[..., :48]
    ),
    "xqa": lambda of, q: _xqa(of, q[..., :64].reshape(BATCH, HEADS, 64)),
    "xqa_mla": xqa_mla_of,
    "flare, window": lambda of, q: flare(of, q, SlidingWindowCausalMask(9)),
    "flare, combined": lambda of, q: flare(
        of, q, OrMask(ChunkedMask(16), CausalPaddingMask(of.lengths))
    ),
    "flare, materialized": lambda of, q: flare(of, q, MaterializedMask(of.bias)),
    "flare, dense": lambda of, q: flare_mla_decoding(
        q, of.dense_keys, ChunkedMask(16), None, MLA_SCALE
    ),
    "wrapper without a plan": planless,
}
