"""The arguments of one MLA decode call, common to all entry points."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mlagen.families.common.arguments import (
    canonical_scale,
    require_choice,
    require_flag,
    require_whole_number,
)
from mlagen.families.common.launchers import LSE_FACTORS, Computed


class MlaArgNames(NamedTuple):
    """The entry point's parameter names, for messages."""

    query: str = "query"
    query_rope: str = "query"
    query_scales: str = "q_scale"
    kv_cache: str = "kv_cache"
    rope_cache: str = "kv_cache"
    value_cache: str = "v_cache"
    kv_scales: str = "kv_scales"
    workspace_buffer: str = "workspace_buffer"
    block_tables: str = "block_tables"
    kv_indptr: str = "kv_indptr"
    seq_lens: str = "seq_lens"
    cum_seq_lens_q: str = "cum_seq_lens_q"
    top_k_lens: str = "sparse_mla_top_k_lens"
    extra_cache: str = "compressed_kv_cache"
    extra_indices: str = "extra_sparse_indices"
    extra_top_k_lens: str = "extra_sparse_topk_lens"
    out: str = "out"
    lse: str = "lse"
    bmm1_scale: str = "bmm1_scale"
    bmm2_scale: str = "bmm2_scale"


class MlaArgs(NamedTuple):
    """The arguments of a call in one layout for all entry points.

    A separate tensor for a part is in the field of that part; unused fields are None, 0 or 1.0.
    """

    query: torch.Tensor  # [batch, q_len, heads, d] or, ragged, [tokens, heads, d]
    kv_cache: torch.Tensor  # [pages, page_size, d], with or without an axis of size 1
    workspace_buffer: torch.Tensor
    kv_lora_rank: int
    qk_rope_head_dim: int
    block_tables: torch.Tensor  # [batch, max_pages], [batch, 2, max_pages] or flat page ids;
    # with top_k sparse top-k indices [batch, q_len, top_k] or [tokens, top_k]
    seq_lens: torch.Tensor | None  # None with two pools
    max_seq_len: int
    out: torch.Tensor | None = None
    bmm1_scale: float | torch.Tensor = 1.0
    bmm2_scale: float | torch.Tensor = 1.0
    sinks: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    return_lse: bool = False
    return_lse_base: str = "base2"
    cum_seq_lens_q: torch.Tensor | None = None
    max_q_len: int | None = None
    top_k: int = 0
    top_k_lens: torch.Tensor | None = None  # int32 [tokens]
    is_causal: bool = True
    bmm2_scales_scores: bool = False
    query_rope: torch.Tensor | None = None  # with it, query holds the latent part only
    query_scales: torch.Tensor | None = None  # fp32 [tokens], fp8_per_token only
    rope_cache: torch.Tensor | None = None  # with it, kv_cache holds the latent part only
    value_cache: torch.Tensor | None = None  # shape of kv_cache; its first elements are the values
    kv_scales: torch.Tensor | None = None  # fp32 [pages, page_size] (fp8_per_token), or
    # [pages, page_size, 4] (FP8 KV cache with a 16-bit query)
    latent_scale: float = 1.0  # of an e4m3 cache with a 16-bit query
    rope_scale: float = 1.0
    kv_indptr: torch.Tensor | None = None  # int32 [batch + 1]: offsets into flat page ids
    bias: torch.Tensor | None = None  # fp32 [tokens, heads or 1, positions], added to the scores
    is_fp8_per_token: bool = False  # 640-byte rows in query and cache
    out_shape: tuple[int, ...] | None = None  # of a new output, if it is not that of the query
    is_planned: bool = False  # query tokens need neither keys nor a request
    causal_seqlens_kv_global: torch.Tensor | None = None  # int32 [batch], in context parallel
    cp_world: int = 1
    cp_rank: int = 0
    # With two pools: kv_cache, block_tables, top_k and top_k_lens are those of the first. Both are
    # uint8 [pages, page_size, row bytes].
    kv_cache_format: str | None = None  # the value of a dtype with an extra_row
    extra_cache: torch.Tensor | None = None
    extra_indices: torch.Tensor | None = None
    extra_top_k_lens: torch.Tensor | None = None
    batch_invariant: bool = False  # the bits of a result do not depend on the rest of the batch
    enable_pdl: bool = True
    computed: Computed | None = None  # by the entry point at every call
    names: MlaArgNames = MlaArgNames()


def canonical_numbers(args: MlaArgs) -> MlaArgs:
    """Return the arguments with built-in Python numbers."""
    names, max_q_len = args.names, args.max_q_len
    return args._replace(
        kv_lora_rank=require_whole_number(args.kv_lora_rank, "kv_lora_rank"),
        qk_rope_head_dim=require_whole_number(args.qk_rope_head_dim, "qk_rope_head_dim"),
        max_seq_len=require_whole_number(args.max_seq_len, "max_seq_len"),
        bmm1_scale=canonical_scale(args.bmm1_scale, names.bmm1_scale),
        bmm2_scale=canonical_scale(args.bmm2_scale, names.bmm2_scale),
        return_lse=require_flag(args.return_lse, "return_lse"),
        return_lse_base=require_choice(args.return_lse_base, "return_lse_base", LSE_FACTORS),
        max_q_len=None if max_q_len is None else require_whole_number(max_q_len, "max_q_len"),
        top_k=require_whole_number(args.top_k, "sparse_mla_top_k"),
    )
