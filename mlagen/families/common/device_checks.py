"""Checks of tensor contents, which synchronize with the device: the debug mode ``MLAGEN_CHECK=1``.

They find what a kernel tolerates silently: page ids out of range, lengths beyond the capacity of
the block tables, cumulative query lengths that decrease.
"""

from __future__ import annotations

from typing import Any

import torch

from mlagen.errors import CaptureError
from mlagen.families.common.arguments import reject
from mlagen.families.common.problem import Problem
from mlagen.runtime.capture import is_capturing


def require_no_capture(tensor: torch.Tensor) -> None:
    """Reject a synchronizing check during CUDA graph capture."""
    if is_capturing(tensor.device):
        raise CaptureError(
            "MLAGEN_CHECK: expected 0 while a CUDA graph is captured, got 1; its checks would wait "
            "for the device"
        )


def query_lengths(
    cu_seqlens: torch.Tensor, argument: str, tokens: int, *, may_have_more: bool = False
) -> torch.Tensor:
    """Return the query tokens of each request, on the CPU.

    The query has ``tokens`` of them. If it ``may_have_more``, some belong to no request.
    """
    on_host = cu_seqlens.cpu().long()
    first, last = int(on_host[0]), int(on_host[-1])
    if first != 0:
        reject(f"{argument}[0]", 0, first)
    if last > tokens or (last < tokens and not may_have_more):
        rule = f"{tokens} (tokens of query)" + (" or less" if may_have_more else "")
        reject(f"{argument}[-1]", rule, last)
    return _lengths(on_host, argument)


def check_seq_lens(
    seq_lens: torch.Tensor,
    argument: str,
    *,
    capacity: int | torch.Tensor | None,
    q_lens: torch.Tensor | None,
) -> torch.Tensor:
    """Return the lengths, on the CPU.

    ``capacity`` is the tokens that the block table of every request, or of each, covers. ``q_lens``
    are the new tokens that each length includes. An empty request with new tokens is padding.
    """
    lengths = seq_lens.cpu().long()
    if (index := _first_true(lengths < 0)) is not None:
        reject(f"{argument}[{index}]", "0 or more", int(lengths[index]))
    if capacity is not None:
        max_lengths = torch.as_tensor(capacity, dtype=torch.int64, device="cpu").expand_as(lengths)
        if (index := _first_true(lengths > max_lengths)) is not None:
            rule = f"{int(max_lengths[index])} (capacity of its block table) or less"
            reject(f"{argument}[{index}]", rule, int(lengths[index]))
    if q_lens is not None:
        is_too_short = (lengths > 0) & (lengths < q_lens)
        if (index := _first_true(is_too_short)) is not None:
            rule = f"0, or {int(q_lens[index])} (its query tokens) or more"
            reject(f"{argument}[{index}]", rule, int(lengths[index]))
    return lengths


def check_tables(args: Any, problem: Problem, seq_lens: torch.Tensor, page_size: int) -> None:
    """Reject used page ids that are out of range, in block tables or flat."""
    name, pages = args.names.block_tables, problem.num_pages
    on_host, used_pages = args.block_tables.cpu().long(), -(-seq_lens // page_size)
    if args.kv_indptr is not None:
        starts = args.kv_indptr.cpu().tolist()
        for request, (first, count) in enumerate(zip(starts, used_pages.tolist(), strict=False)):
            ids = on_host[first : first + count]
            if (page := _first_true((ids < 0) | (ids >= pages))) is not None:
                where = f"{name}[{first + page}] (request {request}, page {page})"
                _reject_page(where, pages, int(ids[page]))
        return
    columns = torch.arange(on_host.shape[-1], dtype=torch.int64, device="cpu")
    is_used = columns < used_pages[:, None]
    parts = {"": on_host} if on_host.dim() == 2 else {"0, ": on_host[:, 0], "1, ": on_host[:, 1]}
    for part, ids in parts.items():
        if (index := _first_true(is_used & ((ids < 0) | (ids >= pages)))) is not None:
            request, column = divmod(index, ids.shape[1])
            _reject_page(f"{name}[{request}, {part}{column}]", pages, int(ids[request, column]))


def table_capacity(
    kv_indptr: torch.Tensor, argument: str, *, page_ids: int, page_size: int
) -> torch.Tensor:
    """Return the capacity of each request's flat page table in tokens, on the CPU."""
    on_host = kv_indptr.cpu().long()
    if int(on_host[0]) < 0:
        reject(f"{argument}[0]", "0 or more", int(on_host[0]))
    if int(on_host[-1]) > page_ids:
        reject(f"{argument}[-1]", f"{page_ids} (page ids) or less", int(on_host[-1]))
    return _lengths(on_host, argument) * page_size


def _lengths(indptr: torch.Tensor, argument: str) -> torch.Tensor:
    """Return the differences of ``indptr``, which must not decrease."""
    lengths = indptr.diff()
    if (index := _first_true(lengths < 0)) is not None:
        rule = f"{int(indptr[index])} or more ({argument}[{index}])"
        reject(f"{argument}[{index + 1}]", rule, int(indptr[index + 1]))
    return lengths


def _reject_page(where: str, num_pages: int, got: int) -> None:
    reject(where, f"0 to {num_pages - 1} (pages of the cache)", got)


def _first_true(condition: torch.Tensor) -> int | None:
    """Return the flat index of the first true element; None where there is none."""
    indices = condition.flatten().nonzero()
    return int(indices[0]) if len(indices) else None
