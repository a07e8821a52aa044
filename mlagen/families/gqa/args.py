"""The arguments of one grouped-query decode call, common to all entry points."""

from __future__ import annotations

from typing import NamedTuple

import torch


class GqaArgNames(NamedTuple):
    """The entry point's parameter names, for messages."""

    query: str = "query"
    kv_cache: str = "kv_cache"  # if one tensor holds K and V
    key_cache: str = "kv_cache[0]"
    value_cache: str = "kv_cache[1]"
    kv_scales: str = "kv_cache_sf"  # if one tensor holds K and V scales
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
    """The arguments of a call in one layout for all entry points.

    The caches and scales are not split: a view of one part costs more than a launch.
    """

    query: torch.Tensor  # [tokens, heads, head_dim], or, with_beam_axis, [batch, 1, q_len, ...]
    key_cache: torch.Tensor  # four dimensions; five if it holds K and V
    value_cache: torch.Tensor | None  # None: in key_cache, an axis of 2, or of 1 where K is V
    workspace_buffer: torch.Tensor
    block_tables: torch.Tensor  # [batch, max_pages]
    seq_lens: torch.Tensor  # [batch] or [batch, 1], including the new tokens
    max_seq_len: int
    q_len: int = 1  # of every request, or the maximum with cum_seq_lens_q
    kv_layout: str = "NHD"
    window: int = 0  # tokens that a row attends to, including itself; 0: no limit
    out: torch.Tensor | None = None
    bmm1_scale: float | torch.Tensor = 1.0
    bmm2_scale: float | torch.Tensor = 1.0
    out_16bit_factor: float = 1.0  # multiplies an output of 16 bits
    out_e4m3_factor: float = 1.0  # multiplies an output of e4m3
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None  # packed tree mask of draft tokens; None: causal
    cum_seq_lens_q: torch.Tensor | None = None
    key_scales: torch.Tensor | None = None  # NVFP4 only; four dimensions, five if it holds K and V
    value_scales: torch.Tensor | None = None
    with_beam_axis: bool = False  # an axis of size 1 follows the batch in query and out
    # bmm2_scale multiplies the scores too, and is ignored with a 16-bit cache; the scores are
    # multiplied by 1 / sqrt(head_dim).
    scales_like_xqa: bool = False
    names: GqaArgNames = GqaArgNames()
