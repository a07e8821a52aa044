"""The problem of a valid call, and its shape, which the launch plan depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes and strides of a valid call of any family."""

    device: torch.device
    out_dtype: torch.dtype
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    batch: int
    q_len: int  # of every request; 0 where requests differ
    tokens: int  # query tokens of all requests
    heads: int
    num_pages: int
    max_pages: int  # of a request; with flat page ids of all
    strides: dict[str, int]  # by kernel parameter


@dataclass(frozen=True, kw_only=True)
class ProblemShape:
    """Shape of a decode call, which determines its launch but not its cubin."""

    batch: int
    q_len: int  # per sequence; 0 if ragged
    tile_q_len: int  # that the tile is chosen for: q_len, or the maximum or an estimate if ragged
    heads: int
    kv_heads: int = 1
    total_rows: int  # query tokens of all sequences, times heads
    max_kv_len: int  # upper bound of the tokens that a row attends to

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Query rows per sequence and KV head that the tile is chosen for."""
        return self.tile_q_len * self.group_size

    def per_token(self) -> ProblemShape:
        """Return the shape of a sparse call, in which every query token is a sequence."""
        return replace(self, batch=self.total_rows // self.heads, q_len=1, tile_q_len=1)
