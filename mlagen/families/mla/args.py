"""The arguments of one MLA decode call, common to all entry points."""

from __future__ import annotations

from typing import NamedTuple

import torch


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
    seq_lens: torch.Tensor
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
    scores_take_bmm2: bool = False
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
    names: MlaArgNames = MlaArgNames()
