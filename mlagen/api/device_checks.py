"""Checks of what tensors hold, which wait for the device: the debug mode of ``MLAGEN_CHECK=1``.

They find what a kernel must survive without saying so: page ids that are no pages, lengths that
their tables cannot hold, ends of ragged queries that go back.
"""

from __future__ import annotations

import torch

from mlagen.api.arguments import reject
from mlagen.errors import CaptureError
from mlagen.runtime.capture import is_capturing


def require_no_capture(tensor: torch.Tensor) -> None:
    """Reject to wait for a device whose work is being captured.

    Raises
    ------
    CaptureError
        If it is.
    """
    if is_capturing(tensor.device):
        raise CaptureError(
            "MLAGEN_CHECK: expected 0 while a CUDA graph is captured, got 1; its checks would wait "
            "for the device"
        )


def query_lengths(
    ends: torch.Tensor, argument: str, tokens: int, *, may_have_more: bool = False
) -> torch.Tensor:
    """Return the query tokens of each request, on the CPU.

    The query has ``tokens`` of them, or more if it ``may_have_more`` that belong to no request.

    Raises
    ------
    ArgumentError
        If ``ends[batch + 1]`` does not split the query's tokens among the requests.
    """
    known = ends.cpu().long()
    first, last = int(known[0]), int(known[-1])
    if first != 0:
        reject(f"{argument}[0]", 0, first)
    if last > tokens or (last < tokens and not may_have_more):
        rule = f"{tokens} (tokens of query)" + (" or less" if may_have_more else "")
        reject(f"{argument}[-1]", rule, last)
    return _lengths(known, argument)


def check_seq_lens(
    seq_lens: torch.Tensor,
    argument: str,
    *,
    capacity: int | torch.Tensor | None,
    q_lens: torch.Tensor | None,
) -> torch.Tensor:
    """Return the lengths, on the CPU.

    ``capacity`` is what the table of every request holds, or of each, in tokens; ``q_lens`` the new
    tokens of each that a length includes. An empty request may have new tokens: it is padding.

    Raises
    ------
    ArgumentError
        If a length is out of the range.
    """
    known = seq_lens.cpu().long()
    if (position := _first(known < 0)) is not None:
        reject(f"{argument}[{position}]", "0 or more", int(known[position]))
    if capacity is not None:
        most = torch.as_tensor(capacity).expand_as(known)
        if (position := _first(known > most)) is not None:
            rule = f"{int(most[position])} (what its block table holds) or less"
            reject(f"{argument}[{position}]", rule, int(known[position]))
    if q_lens is not None and (position := _first((known > 0) & (known < q_lens))) is not None:
        rule = f"0, or {int(q_lens[position])} (its query tokens) or more"
        reject(f"{argument}[{position}]", rule, int(known[position]))
    return known


def check_page_ids(
    block_tables: torch.Tensor,
    argument: str,
    *,
    seq_lens: torch.Tensor,
    page_size: int,
    num_pages: int,
) -> None:
    """Reject ids in ``block_tables[batch, max_pages]`` that are used and are no pages.

    Raises
    ------
    ArgumentError
        If there is one; the message names its request and its position.
    """
    known = block_tables.cpu().long()
    used = -(-seq_lens // page_size)
    is_used = torch.arange(known.shape[1]) < used[:, None]
    is_wild = is_used & ((known < 0) | (known >= num_pages))
    if (at := _first(is_wild)) is not None:
        request, position = divmod(at, known.shape[1])
        _reject_page(f"{argument}[{request}, {position}]", num_pages, int(known[request, position]))


def check_flat_page_ids(
    page_ids: torch.Tensor,
    argument: str,
    *,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    num_pages: int,
) -> None:
    """Reject ids in ``page_ids`` that are used and are no pages.

    Raises
    ------
    ArgumentError
        If there is one; the message names its request and its position.
    """
    known = page_ids.cpu().long()
    firsts = starts.cpu().long()
    for request, length in enumerate(seq_lens.tolist()):
        first = int(firsts[request])
        own = known[first : first - (-length // page_size)]
        if (position := _first((own < 0) | (own >= num_pages))) is not None:
            where = f"{argument}[{first + position}] (request {request}, page {position})"
            _reject_page(where, num_pages, int(own[position]))


def table_capacity(
    starts: torch.Tensor, argument: str, *, page_ids: int, page_size: int
) -> torch.Tensor:
    """Return the tokens that the flat table of each request holds, on the CPU.

    Raises
    ------
    ArgumentError
        If ``starts[batch + 1]`` goes back, or past the ``page_ids`` that there are.
    """
    known = starts.cpu().long()
    if int(known[0]) < 0:
        reject(f"{argument}[0]", "0 or more", int(known[0]))
    if int(known[-1]) > page_ids:
        reject(f"{argument}[-1]", f"{page_ids} (page ids) or less", int(known[-1]))
    return _lengths(known, argument) * page_size


def _lengths(ends: torch.Tensor, argument: str) -> torch.Tensor:
    """Return the differences of ends that must not go back."""
    lengths = ends.diff()
    if (position := _first(lengths < 0)) is not None:
        rule = f"{int(ends[position])} or more ({argument}[{position}])"
        reject(f"{argument}[{position + 1}]", rule, int(ends[position + 1]))
    return lengths


def _reject_page(where: str, num_pages: int, got: int) -> None:
    reject(where, f"0 to {num_pages - 1} (pages of the cache)", got)


def _first(condition: torch.Tensor) -> int | None:
    """Return the flat position of the first true element, None where there is none."""
    found = condition.flatten().nonzero()
    return int(found[0]) if len(found) else None
