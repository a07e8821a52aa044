"""The problem of a valid call, its shape, and the launch plan that depends on the shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mlagen.families.common.arguments import (
    require,
    require_contiguous,
    require_dense_last_dim,
    require_dims,
    require_index,
    require_ints,
    require_scale,
    require_tensor,
    require_workspace,
)


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
    is_windowed: bool = False  # which may be behind others

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


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Grid and workspace of one call, by any kernel."""

    num_ctas: int
    num_splits: int = 0  # that a kernel of its own combines; 0: of a kernel that does so itself
    partial_rows_offset: int  # bytes in the workspace, of partial LSEs or states; outputs are first
    row_splits_offset: int = 0  # the same of the splits of each row, with fixed splits
    workspace_bytes: int


def tile_q_len_of(problem: Any, q_len: int) -> int:
    """Return the query tokens of a request that the tile is chosen for, by default ``q_len``.

    Where requests differ in theirs, a batch-invariant call takes the tile of one token: that of the
    longest depends on the batch.
    """
    is_ragged = problem.q_len == 0
    return 1 if is_ragged and problem.variant.batch_invariant else q_len


def require_scratch_and_scales(args: Any) -> None:
    """Reject a workspace or a scale of the call that breaks a rule."""
    names, device = args.names, args.query.device
    require_workspace(args.workspace_buffer, names.workspace_buffer, device)
    require_scale(args.bmm1_scale, names.bmm1_scale, device)
    require_scale(args.bmm2_scale, names.bmm2_scale, device)


def checked_tables(args: Any, batch: int, dims: tuple[int, ...]) -> torch.Tensor:
    """Return block tables of one of these dimensions, or flat page ids with ``kv_indptr``."""
    name, device = args.names.block_tables, args.query.device
    tables = require_tensor(args.block_tables, name)
    require_index(tables, name, device)
    if args.kv_indptr is not None:
        require_ints(args.kv_indptr, args.names.kv_indptr, device, ((batch + 1,),), "batch + 1")
        require_dims(tables, name, (1,))
        require_contiguous(tables, name)
    else:
        require_dims(tables, name, dims)
        require(tables.shape[0] == batch, f"{name}.shape[0]", f"{batch} (batch)", tables.shape[0])
        require_dense_last_dim(tables, name)
    return tables
