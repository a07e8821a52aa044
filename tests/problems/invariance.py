"""Batches of one set of requests, in any order and memory, for tests of batch-invariant calls.

The tensors of a batch are made once, so that a CUDA graph may capture its call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

import mlagen
from mlagen.mla import CausalMask, PagedKVCache
from mlagen.writers import dsv4_fp8_quantize_pack_sparse_mla_cache
from tests.problems.problem import E4M3, POISON

Results = tuple[torch.Tensor, ...]  # out, and the LSE of entry points that have one

_MLA_WIDTH, _RANK = 576, 512


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the requests of a form have in common."""

    heads: int = 16
    q_len: int = 1
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16  # of the query
    kv: str = ""  # "e4m3", "fp8_ds_mla", "dsv4", "int8" or "nvfp4"; else as the query
    kv_heads: int = 0  # 0: MLA
    head_dim: int = 128
    window: int = 0
    soft_cap: float = 0.0
    min_len: int = 0


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Requests with tokens of their own in a pool; the last one has NaN in all of its tokens."""

    facts: Facts
    lens: torch.Tensor  # [requests]
    query: torch.Tensor  # [requests, q_len, heads, d]
    pools: dict[str, torch.Tensor]  # [pages, ...]
    tables: torch.Tensor  # [requests, pages]
    sinks: torch.Tensor

    @property
    def count(self) -> int:
        """The requests without NaN."""
        return len(self.lens) - 1

    def moved(self, seed: int) -> Requests:
        """Return the same requests in other pages of a larger pool, amid NaN."""
        pages = len(next(iter(self.pools.values())))
        generator = torch.Generator().manual_seed(seed)
        places = torch.randperm(pages + 7, generator=generator)[:pages].to(self.tables.device)
        pools = {}
        for name, pool in self.pools.items():
            stored = pool.view(torch.uint8)
            pools[name] = stored.new_full((pages + 7, *stored.shape[1:]), POISON)
            pools[name][places] = stored
            pools[name] = pools[name].view(pool.dtype)
        return replace(self, pools=pools, tables=places[self.tables.long()].int())


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some requests, by their indices, and all that must not matter."""

    of: Requests
    idx: torch.Tensor
    spare_columns: int = 0
    spare_len: int = 0  # added to max_seq_len
    workspace_bytes: int = 0  # 0 for enough
    batch_invariant: bool | None = True

    @cached_property
    def lens(self) -> torch.Tensor:
        """Lengths of the requests."""
        return self.of.lens[self.idx]

    @cached_property
    def query(self) -> torch.Tensor:
        """Query tokens of the requests."""
        return self.of.query[self.idx]

    @cached_property
    def tables(self) -> torch.Tensor:
        """Block tables, no wider than needed but for the spare columns."""
        pages = -(-int(self.lens.max()) // self.of.facts.page_size) + self.spare_columns
        tables = self.of.tables[self.idx]
        more = max(0, pages - tables.shape[1])
        return torch.nn.functional.pad(tables, (0, more), value=-1)[:, : max(1, pages)].contiguous()

    @cached_property
    def common(self) -> dict[str, Any]:
        """Arguments of every entry point over block tables."""
        return {
            "block_tables": self.tables,
            "seq_lens": self.lens,
            "max_seq_len": int(self.lens.max()) + self.spare_len,
            **self.scratch,
        }

    @cached_property
    def scratch(self) -> dict[str, Any]:
        """The workspace, and the mode."""
        device = self.lens.device
        size = self.workspace_bytes or (96 if device.type == "cuda" else 24) << 20
        workspace = torch.full((size,), POISON, dtype=torch.uint8, device=device)
        return {"workspace_buffer": workspace, "batch_invariant": self.batch_invariant}

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Offsets of the query tokens of the requests."""
        count, q_len = len(self.idx), self.of.facts.q_len
        return torch.arange(count + 1, dtype=torch.int32, device=self.lens.device) * q_len

    def csr(self) -> dict[str, torch.Tensor]:
        """Return offsets, page ids and the tokens of last pages, on the CPU."""
        size, lens = self.of.facts.page_size, self.lens.tolist()
        counts = [-(-length // size) for length in lens]
        tables = self.of.tables[self.idx].cpu()
        ids = [row[:count] for row, count in zip(tables, counts, strict=True)]
        tails = [(length - 1) % size + 1 if length else 0 for length in lens]
        return {
            "indptr": torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32),
            "indices": torch.cat(ids),
            "last_page_len": torch.tensor(tails, dtype=torch.int32),
        }


def build(facts: Facts, lens: Sequence[int], device: str, seed: int = 0) -> Requests:
    """Return requests of these lengths, and one more with NaN."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    all_lens = [max(length, facts.min_len) for length in (*lens, max(lens))]
    pages = [-(-length // facts.page_size) for length in all_lens]
    ids = iter(torch.randperm(sum(pages), generator=torch.Generator().manual_seed(seed)).tolist())
    tables = [[next(ids) for _ in range(count)] for count in pages]
    width = max(pages)
    padded = [[*row, *[-1] * (width - len(row))] for row in tables]
    pools = _pools(facts, sum(pages), random)
    for pool in pools.values():
        pool.view(torch.uint8)[tables[-1]] = POISON
    head_dim = facts.head_dim if facts.kv_heads else _RANK if facts.kv == "dsv4" else _MLA_WIDTH
    query = random(len(all_lens), facts.q_len, facts.heads, head_dim) * 2
    return Requests(
        facts=facts,
        lens=torch.tensor(all_lens, dtype=torch.int32, device=device),
        query=query.to(facts.dtype),
        pools=pools,
        tables=torch.tensor(padded, dtype=torch.int32, device=device),
        sinks=random(facts.heads),
    )


def _pools(
    facts: Facts, pages: int, random: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    size = facts.page_size
    if facts.kv == "dsv4":
        tokens = random(pages, size, _RANK).bfloat16()
        return {"cache": dsv4_fp8_quantize_pack_sparse_mla_cache(tokens)}
    if facts.kv == "fp8_ds_mla":
        parts = (
            random(pages, size, _RANK).to(E4M3),
            random(pages, size, 4).abs() + 0.5,
            random(pages, size, 64).bfloat16(),
        )
        return {"cache": torch.cat([part.view(torch.uint8) for part in parts], dim=-1)}
    dtypes = {"": facts.dtype, "e4m3": E4M3, "int8": torch.int8, "nvfp4": torch.uint8}
    dtype = dtypes[facts.kv]
    if not facts.kv_heads:
        return {"cache": random(pages, size, _MLA_WIDTH).to(dtype)}
    shape = (pages, size, facts.kv_heads, facts.head_dim)
    if facts.kv == "nvfp4":
        packed = (*shape[:-1], facts.head_dim // 2)
        scales = (*shape[:-1], facts.head_dim // 16)
        codes = {name: (random(*packed) * 60).int().to(torch.uint8) for name in ("key", "value")}
        return codes | {
            f"{name}_scales": (random(*scales).abs() + 0.1).to(E4M3) for name in ("key", "value")
        }
    factor = 40 if facts.kv == "int8" else 1
    return {name: (random(*shape) * factor).to(dtype) for name in ("key", "value")}


def _both(result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Results:
    assert isinstance(result, tuple)
    return result


def mla(batch: Batch, **more: Any) -> Results:
    """Call ``trtllm_batch_decode_with_kv_cache_mla``."""
    given = batch.common | {"query": batch.query} | more
    result = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(
        kv_cache=batch.of.pools["cache"],
        qk_nope_head_dim=128,
        kv_lora_rank=_RANK,
        qk_rope_head_dim=64,
        bmm1_scale=0.02,
        sinks=batch.of.sinks,
        return_lse=True,
        **given,
    )
    return _both(result)


def mla_ragged(batch: Batch) -> Results:
    """Call it with ragged queries."""
    return mla(batch, query=batch.query.flatten(0, 1), cum_seq_lens_q=batch.offsets)


def mla_dcp(batch: Batch) -> Results:
    """Call it on a rank of decode context parallel."""
    ranks = {"enable_dcp": True, "cp_world": 2, "cp_rank": 1}
    return mla(batch, causal_seqlens_kv_global=batch.lens * 2, **ranks)


def _indices(batch: Batch, width: int) -> torch.Tensor:
    """Return top-k indices ``[batch, q_len, width]``: the tokens of a request, some invalid."""
    facts, lens = batch.of.facts, batch.lens
    positions = torch.arange(width, device=lens.device)
    order = (positions * 7 + 3) % lens.clamp(min=1)[:, None]  # of its tokens
    pages = batch.of.tables[batch.idx].gather(1, order.long() // facts.page_size)
    ids = pages * facts.page_size + order % facts.page_size
    ids = ids.masked_fill(positions % 11 == 5, -1).int()
    return ids[:, None].expand(-1, facts.q_len, -1).contiguous()


def mla_sparse(batch: Batch) -> Results:
    """Call it with top-k indices."""
    width = min(int(batch.lens.max()), 3000) + batch.spare_columns + 1
    lens = batch.lens.clamp(max=3000).repeat_interleave(batch.of.facts.q_len)
    return mla(
        batch,
        block_tables=_indices(batch, width),
        sparse_mla_top_k=width,
        sparse_mla_top_k_lens=lens,
    )


def dsv4(batch: Batch) -> Results:
    """Call ``trtllm_batch_decode_sparse_mla_dsv4`` with two pools, here one."""
    half = batch.lens // 2
    width = int(half.max()) + batch.spare_columns + 1
    result = mlagen.mla.trtllm_batch_decode_sparse_mla_dsv4(
        query=batch.query[:, 0],
        swa_kv_cache=batch.of.pools["cache"],
        sparse_indices=_indices(batch, width)[:, 0],
        swa_topk_lens=half,
        compressed_kv_cache=batch.of.pools["cache"],
        extra_sparse_indices=_indices(batch, width + 5)[:, 0],
        extra_sparse_topk_lens=batch.lens - half,
        bmm1_scale=0.02,
        return_lse=True,
        **batch.scratch,
    )
    return _both(result)


def xqa_batch_mla(batch: Batch) -> Results:
    """Call ``xqa_batch_decode_with_kv_cache_mla``."""
    out = mlagen.decode.xqa_batch_decode_with_kv_cache_mla(
        query=batch.query,
        kv_cache=batch.of.pools["cache"],
        qk_nope_head_dim=128,
        kv_lora_rank=_RANK,
        qk_rope_head_dim=64,
        bmm1_scale=0.02,
        **batch.common,
    )
    return (out,)


def xqa_mla(batch: Batch) -> Results:
    """Call ``xqa_mla``."""
    dtype = torch.bfloat16 if batch.query.dtype is E4M3 else batch.query.dtype
    output = torch.empty(*batch.query.shape[:-1], _RANK, dtype=dtype, device=batch.lens.device)
    cache = batch.of.pools["cache"]
    mlagen.xqa.xqa_mla(
        q=batch.query,
        k_cache=cache,
        v_cache=cache,
        page_table=batch.tables,
        seq_lens=batch.lens[:, None],
        output=output,
        semaphores=torch.zeros(8, dtype=torch.int32, device=batch.lens.device),
        page_size=batch.of.facts.page_size,
        q_scale=0.02,
        **batch.scratch,
    )
    return (output,)


def flare(batch: Batch) -> Results:
    """Call ``flare_mla_decoding``, which has a workspace of its own."""
    cache = PagedKVCache(
        batch.of.pools["cache"], batch.tables, (batch.lens - batch.of.facts.q_len).clamp(min=0)
    )
    out = mlagen.mla.flare_mla_decoding(
        batch.query.flatten(0, 1),
        cache,
        CausalMask(),
        batch.offsets,
        0.02,
        ragged=True,
        batch_invariant=batch.batch_invariant,
    )
    return (out,)


def mla_wrapper(batch: Batch) -> Results:
    """Plan and run ``BatchMLAPagedAttentionWrapper``."""
    csr, facts = batch.csr(), batch.of.facts
    wrapper = mlagen.mla.BatchMLAPagedAttentionWrapper(batch.scratch["workspace_buffer"])
    wrapper.plan(
        batch.offsets.cpu(),
        csr["indptr"],
        csr["indices"],
        batch.lens.cpu(),
        num_heads=facts.heads,
        head_dim_ckv=_RANK,
        head_dim_kpe=64,
        page_size=facts.page_size,
        causal=True,
        sm_scale=0.02,
        q_data_type=facts.dtype,
        kv_data_type=facts.dtype,
        batch_invariant=batch.batch_invariant,
    )
    query, cache = batch.query.flatten(0, 1), batch.of.pools["cache"]
    return _both(wrapper.run(query=query, kv_cache=cache, return_lse=True))


def _caches(batch: Batch) -> dict[str, Any]:
    pools = batch.of.pools
    scales = (pools["key_scales"], pools["value_scales"]) if "key_scales" in pools else None
    return {"kv_cache": (pools["key"], pools["value"]), "kv_cache_sf": scales}


def gqa(batch: Batch, **more: Any) -> Results:
    """Call ``xqa_batch_decode_with_kv_cache``."""
    facts = batch.of.facts
    result = mlagen.decode.xqa_batch_decode_with_kv_cache(
        query=batch.query.flatten(0, 1),
        bmm1_scale=0.05,
        window_left=facts.window - 1,
        logits_soft_cap=facts.soft_cap,
        sinks=batch.of.sinks,
        q_len_per_req=facts.q_len,
        return_lse=True,
        **batch.common | _caches(batch) | more,
    )
    return _both(result)


def gqa_ragged(batch: Batch) -> Results:
    """Call it with ragged queries."""
    return gqa(batch, q_cu_seq_lens=batch.offsets)


def trtllm_gqa(batch: Batch) -> Results:
    """Call ``trtllm_batch_decode_with_kv_cache``."""
    facts = batch.of.facts
    result = mlagen.decode.trtllm_batch_decode_with_kv_cache(
        query=batch.query.flatten(0, 1),
        bmm1_scale=0.05,
        window_left=facts.window - 1,
        kv_layout="NHD",
        q_len_per_req=facts.q_len,
        return_lse=True,
        **batch.common | _caches(batch),
    )
    return _both(result)


def xqa(batch: Batch) -> Results:
    """Call ``xqa``, with queries of one token."""
    query, pools, facts = batch.query, batch.of.pools, batch.of.facts
    output, device = torch.empty_like(query), batch.lens.device
    lse = torch.full(query.shape[:-1], math.nan, device=device)
    mlagen.xqa.xqa(
        q=query,
        k_cache=pools["key"],
        v_cache=pools["value"],
        page_table=batch.tables,
        seq_lens=batch.lens[:, None],
        output=output,
        semaphores=torch.zeros(8, dtype=torch.int32, device=device),
        num_kv_heads=facts.kv_heads,
        page_size=facts.page_size,
        q_scale=0.6,
        lse=lse,
        **batch.scratch,
    )
    return output, lse


def gqa_wrapper(batch: Batch) -> Results:
    """Plan and run ``BatchDecodeWithPagedKVCacheWrapper``, with FlashInfer's keyword."""
    facts, csr, scratch = batch.of.facts, batch.csr(), batch.scratch
    wrapper = mlagen.decode.BatchDecodeWithPagedKVCacheWrapper(scratch["workspace_buffer"])
    wrapper.plan(
        csr["indptr"],
        csr["indices"],
        csr["last_page_len"],
        num_qo_heads=facts.heads,
        num_kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        page_size=facts.page_size,
        window_left=facts.window - 1,
        q_data_type=facts.dtype,
        sm_scale=0.05,
        fixed_split_size=2048 if batch.batch_invariant else -1,
        q_len_per_req=facts.q_len,
    )
    caches = (batch.of.pools["key"], batch.of.pools["value"])
    return _both(wrapper.run(batch.query.flatten(0, 1), caches, return_lse=True))


def bits(tensor: torch.Tensor, requests: int) -> torch.Tensor:
    """Return the bits of a result by request ``[requests, n]``."""
    return tensor.contiguous().view(torch.uint8).view(requests, -1)


Form = Callable[[Batch], Results]


def alone(form: Form, requests: Requests, **others: Any) -> list[torch.Tensor]:
    """Return the bits of each request alone, in a tight table: of the outputs, and of the LSE."""
    found = []
    for index in range(requests.count):
        idx = torch.tensor([index], device=requests.lens.device)
        given = form(Batch(of=requests, idx=idx, **others))
        found.append([bits(one, 1) for one in given])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def differing(results: Results, batch: Batch, expected: list[torch.Tensor]) -> list[int]:
    """Return the requests of a batch whose bits are not those that they have alone."""
    given = [bits(one, len(batch.idx)) for one in results]
    is_known = batch.idx < batch.of.count
    idx = batch.idx.clamp(max=batch.of.count - 1)
    differs = torch.zeros_like(is_known)
    for one, known in zip(given, expected, strict=True):
        differs |= (one != known[idx]).any(dim=1)
    return sorted({*batch.idx[differs & is_known].tolist()})


def random_batch(requests: Requests, seed: int, max_batch: int, **others: Any) -> Batch:
    """Return requests at random places, some with NaN, in memory of random sizes."""
    generator = torch.Generator().manual_seed(seed)

    def number(end: int) -> int:
        return int(torch.randint(end, (1,), generator=generator))

    idx = torch.randint(len(requests.lens), (1 + number(max_batch),), generator=generator)
    return Batch(
        of=requests.moved(seed) if seed % 2 else requests,
        idx=idx.to(requests.lens.device),
        spare_columns=number(50),
        spare_len=number(3) * 5000,
        **others,
    )
