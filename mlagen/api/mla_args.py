"""The arguments of one MLA decode call, whichever entry point took them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class MlaArgNames(NamedTuple):
    """What the caller knows the arguments by, for messages."""

    query: str = "query"
    query_rope: str = "query"
    query_scales: str = "q_scale"
    kv_cache: str = "kv_cache"
    rope_cache: str = "kv_cache"
    value_cache: str = "v_cache"
    kv_scales: str = "kv_scales"
    workspace_buffer: str = "workspace_buffer"
    block_tables: str = "block_tables"
    table_starts: str = "kv_indptr"
    seq_lens: str = "seq_lens"
    cum_seq_lens_q: str = "cum_seq_lens_q"
    top_k_lens: str = "sparse_mla_top_k_lens"
    out: str = "out"
    lse: str = "lse"
    bmm1_scale: str = "bmm1_scale"
    bmm2_scale: str = "bmm2_scale"


class MlaArgs(NamedTuple):
    """What the caller passed, in one form for all entry points.

    A part that the caller keeps in a tensor of its own is in the field of that part, and what is
    not used is None, 0 or 1.0.
    """

    query: torch.Tensor  # [batch, q_len, heads, d] or, ragged, [tokens, heads, d]
    kv_cache: torch.Tensor  # [pages, page_size, d], with an axis of size 1 or without
    workspace_buffer: torch.Tensor
    kv_lora_rank: int
    qk_rope_head_dim: int
    block_tables: torch.Tensor  # [batch, max_pages], [batch, 2, max_pages] or flat page ids;
    # with top_k token indices [batch, q_len, top_k] or [tokens, top_k]
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
    query_rope: torch.Tensor | None = None  # like query; query holds the latent part only then
    query_scales: torch.Tensor | None = None  # fp32 [tokens], packed 640-byte rows only
    rope_cache: torch.Tensor | None = None  # like kv_cache, which holds the latent part only then
    value_cache: torch.Tensor | None = None  # like kv_cache; its first elements are the values
    kv_scales: torch.Tensor | None = None  # fp32 [pages, page_size] (packed 640-byte rows), or
    # [pages, page_size, 4] (e4m3 under a 16-bit query)
    latent_scale: float = 1.0  # of e4m3 elements under a 16-bit query
    rope_scale: float = 1.0
    table_starts: torch.Tensor | None = None  # int32 [batch + 1]: where a request's page ids begin
    bias: torch.Tensor | None = None  # fp32 [tokens, heads or 1, positions], added to the scores
    is_fp8_per_token: bool = False  # rows of 640 bytes, in query and cache alike
    names: MlaArgNames = MlaArgNames()
