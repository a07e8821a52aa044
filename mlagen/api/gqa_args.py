"""The arguments of one grouped-query decode call, whichever entry point took them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class GqaArgNames(NamedTuple):
    """What the caller knows the arguments by, for messages."""

    query: str = "query"
    kv_cache: str = "kv_cache"  # where one tensor holds both
    key_cache: str = "kv_cache[0]"
    value_cache: str = "kv_cache[1]"
    kv_scales: str = "kv_cache_sf"  # where one tensor holds both
    key_scales: str = "kv_cache_sf[0]"
    value_scales: str = "kv_cache_sf[1]"
    workspace_buffer: str = "workspace_buffer"
    block_tables: str = "block_tables"
    seq_lens: str = "seq_lens"
    max_seq_len: str = "max_seq_len"
    q_len: str = "q_len_per_req"
    cum_seq_lens_q: str = "q_cu_seq_lens"
    mask: str = "mask"
    sinks: str = "sinks"
    out: str = "out"
    bmm1_scale: str = "bmm1_scale"
    bmm2_scale: str = "bmm2_scale"


class GqaArgs(NamedTuple):
    """What the caller passed, in one form for all entry points.

    The caches and scales are as the caller has them: a view of a part costs more than a launch.
    """

    query: torch.Tensor  # [tokens, heads, head_dim], or, with_beam_axis, [batch, 1, q_len, ...]
    key_cache: torch.Tensor  # four dimensions; five if it holds both
    value_cache: torch.Tensor | None  # None: in key_cache, an axis of 2, or of 1 where K is V
    workspace_buffer: torch.Tensor
    block_tables: torch.Tensor  # [batch, max_pages]
    seq_lens: torch.Tensor  # [batch] or [batch, 1], the new tokens included
    max_seq_len: int
    q_len: int = 1  # of every request, or the longest with cum_seq_lens_q
    kv_layout: str = "NHD"
    window: int = 0  # tokens that a row sees, itself included; 0: no limit
    out: torch.Tensor | None = None
    bmm1_scale: float | torch.Tensor = 1.0
    bmm2_scale: float | torch.Tensor = 1.0
    out_16bit_factor: float = 1.0  # multiplies an output of 16 bits
    out_e4m3_factor: float = 1.0  # multiplies an output of e4m3
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None  # bits of draft tokens; None: causal
    cum_seq_lens_q: torch.Tensor | None = None
    key_scales: torch.Tensor | None = None  # of NVFP4; four dimensions, five if it holds both
    value_scales: torch.Tensor | None = None
    with_beam_axis: bool = False  # an axis of size 1 follows the batch in query and out
    # bmm2 multiplies the scores too, and nothing at all if the cache has 16 bits; the scores take
    # 1 / sqrt(head_dim).
    scales_like_xqa: bool = False
    names: GqaArgNames = GqaArgNames()
