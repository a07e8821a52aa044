"""Query operands of :func:`mlagen.mla.flare.flare_mla_decoding`, ragged or padded.

All computations run on the tensors' device, without synchronization unless ``MLAGEN_CHECK=1``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mlagen.families.common.arguments import reject, require, require_ints
from mlagen.families.common.device_checks import check_seq_lens, query_lengths, require_no_capture
from mlagen.mla.flare_kv import Keys, as_int32
from mlagen.mla.masks import QueryRows
from mlagen.settings import current_settings


class Queries(NamedTuple):
    """The query and its metadata, as kernel arguments."""

    query: torch.Tensor  # [batch, q_len, heads, d], or ragged
    cu_seqlens_q: torch.Tensor | None
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_q_len: int | None
    rows: QueryRows | None  # for materialized masks

    @property
    def computed(self) -> tuple[torch.Tensor, ...]:
        """The tensors that every call computes."""
        if self.max_q_len is None or self.cu_seqlens_q is None:
            return (self.seq_lens,)
        return self.seq_lens, self.cu_seqlens_q, self.block_table


def ragged_queries(
    q: torch.Tensor, keys: Keys, valid_length: torch.Tensor | None, *, needs_rows: bool
) -> Queries:
    """Return ragged queries; ``valid_length`` has the offsets of the requests."""
    batch, tokens = keys.block_table.shape[0], q.shape[0]
    offsets = _checked_lengths(valid_length, q, batch + 1, "batch of k + 1")
    if current_settings().checks_contents:
        require_no_capture(q)
        _check_cached(keys, query_lengths(offsets, "valid_length", tokens))
    require(batch > 0 or tokens == 0, "q.shape[0]", "0 (no requests)", tokens)
    return compute_ragged(q, keys, offsets, needs_rows=needs_rows)


def compute_ragged(
    q: torch.Tensor, keys: Keys, offsets: torch.Tensor, *, needs_rows: bool = False
) -> Queries:
    """Return ragged queries of checked arguments."""
    batch, tokens = keys.block_table.shape[0], q.shape[0]
    new = offsets.diff()
    seq_lens = _total(keys, new)
    rows = None
    if needs_rows:
        index = torch.arange(tokens, dtype=torch.int32, device=q.device)
        # Tokens after the last request belong to none; the clamp keeps their index in bounds.
        requests = torch.searchsorted(offsets[1:].contiguous(), index, right=True)
        requests = requests.clamp(max=max(0, batch - 1))
        positions = (seq_lens - offsets[1:])[requests] + index
        rows = _rows(requests, positions, q, keys)
    return Queries(q, offsets, seq_lens, keys.block_table, None, rows)


def padded_queries(
    q: torch.Tensor, keys: Keys, valid_length: torch.Tensor | None, *, needs_rows: bool
) -> Queries:
    """Return queries padded to ``q_len`` tokens; ``valid_length`` has the valid ones."""
    batch, q_len = keys.block_table.shape[0], q.shape[1]
    require(q.shape[0] == batch, "q.shape[0]", f"{batch} (batch of k)", q.shape[0])
    given = None
    if valid_length is not None or keys.cached is not None:
        given = _checked_lengths(valid_length, q, batch, "batch of q")
        if current_settings().checks_contents:
            require_no_capture(q)
            _check_cached(keys, _checked_new(given, q_len))
    return compute_padded(q, keys, given, needs_rows=needs_rows)


def compute_padded(
    q: torch.Tensor, keys: Keys, given: torch.Tensor | None, *, needs_rows: bool = False
) -> Queries:
    """Return padded queries of checked arguments; without ``given`` all tokens are valid."""
    batch, q_len = keys.block_table.shape[0], q.shape[1]
    if given is None:
        new = torch.full((batch,), q_len, dtype=torch.int32, device=q.device)
    else:
        new = given.clamp(0, q_len)
    seq_lens = _total(keys, new)
    rows = None
    if needs_rows:
        tokens = torch.arange(batch * q_len, dtype=torch.int64, device=q.device)
        requests = tokens // q_len
        rows = _rows(requests, (seq_lens - new)[requests] + tokens % q_len, q, keys)
    if given is None:
        return Queries(q, None, seq_lens, keys.block_table, None, rows)
    if q_len == 1:  # a request without its query token becomes empty
        return Queries(q, None, seq_lens * new, keys.block_table, None, rows)
    # The padding of each request becomes an empty request, whose rows are zeros.
    starts = torch.arange(batch, dtype=torch.int32, device=q.device) * q_len
    cu_seqlens_q = torch.stack([starts, starts + new], dim=1).flatten()
    cu_seqlens_q = torch.nn.functional.pad(cu_seqlens_q, (0, 1), value=batch * q_len)
    return Queries(
        query=q.flatten(0, 1),
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=torch.stack([seq_lens, torch.zeros_like(seq_lens)], dim=1).flatten(),
        block_table=_duplicated_rows(keys.block_table.view(torch.int32)),
        max_q_len=q_len,
        rows=rows,
    )


def _duplicated_rows(table: torch.Tensor) -> torch.Tensor:
    """Return ``table[batch, max_pages]`` with each row repeated."""
    batch, max_pages = table.shape
    return table[:, None].expand(batch, 2, max_pages).reshape(2 * batch, max_pages)


def _checked_lengths(
    valid_length: torch.Tensor | None, q: torch.Tensor, count: int, why: str
) -> torch.Tensor:
    return as_int32(require_ints(valid_length, "valid_length", q.device, ((count,),), why))


def _checked_new(given: torch.Tensor, q_len: int) -> torch.Tensor:
    new = given.cpu().long()
    for request, tokens in enumerate(new.tolist()):
        if not 0 <= tokens <= q_len:
            reject(f"valid_length[{request}]", f"0 to {q_len} (q.shape[1])", tokens)
    return new


def _check_cached(keys: Keys, new: torch.Tensor) -> None:
    if keys.cached is None:
        return
    cached = check_seq_lens(keys.cached, keys.names.seq_lens, capacity=None, q_lens=None)
    for request, tokens in enumerate((cached + new).tolist()):
        if tokens > keys.width:
            rule = f"{keys.width} (capacity of its block table) or less with its new tokens"
            reject(f"{keys.names.seq_lens}[{request}]", rule, tokens)


def _total(keys: Keys, new: torch.Tensor) -> torch.Tensor:
    if keys.cached is None:
        return torch.full_like(new, keys.total)
    return keys.cached + new


def _rows(
    requests: torch.Tensor, positions: torch.Tensor, q: torch.Tensor, keys: Keys
) -> QueryRows:
    return QueryRows(
        requests=requests,
        positions=positions.long(),
        batch=keys.block_table.shape[0],
        heads=q.shape[-2],
        width=keys.width,
    )
