"""The arguments of one MLA decode call, as the caller passed them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class MlaInputs(NamedTuple):
    """What the caller passed; ``max_q_len`` is known here also where the caller left it out."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    workspace_buffer: torch.Tensor
    kv_lora_rank: int
    qk_rope_head_dim: int
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    out: torch.Tensor | None
    bmm1_scale: float | torch.Tensor
    bmm2_scale: float | torch.Tensor
    sinks: torch.Tensor | None
    lse: torch.Tensor | None
    return_lse: bool
    return_lse_base: str
    cum_seq_lens_q: torch.Tensor | None
    max_q_len: int | None
