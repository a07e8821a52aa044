"""A static cache as pages: views of where it lies, block tables, and scratch of the calls."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch

from mlagen import max_workspace_bytes

_PAGE_SIZE = 64  # the KV block of the sm90 kernels
_MIN_PAGE_SIZE = 16  # smaller pages take the sm80 kernels, which read pages of one token as well

_PAGES = "_mlagen_pages"  # an attribute of the bounds

_workspaces: dict[tuple[torch.device, int], torch.Tensor] = {}


class Pages(NamedTuple):
    """The block tables of the sequences in a cache ``[rows, tokens, ...]``."""

    size: int
    block_tables: torch.Tensor  # int32 [rows, pages]
    seq_lens: torch.Tensor  # int32 [rows]

    @property
    def described(self) -> str:
        """Return the page size as words."""
        return "pages of one token" if self.size == 1 else f"pages of {self.size} tokens"


def pages_of(bounds: torch.Tensor, tokens: int, heads: int) -> Pages:
    """Return the pages of a static cache ``[batch, heads, tokens, ...]``.

    A KV head of a sequence is a sequence by itself, so that its pages are contiguous whatever their
    size. Sequences with padding on the left have pages of one token, which begin behind it.
    All layers of a step have the same bounds, and share their pages; a graph computes its own.
    """
    if torch.compiler.is_compiling() or (
        bounds.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        return _pages_of(bounds, tokens, heads)
    known: dict[tuple[int, int], Pages] = bounds.__dict__.setdefault(_PAGES, {})
    if (tokens, heads) not in known:
        known[tokens, heads] = _pages_of(bounds, tokens, heads)
    return known[tokens, heads]


def _pages_of(bounds: torch.Tensor, tokens: int, heads: int) -> Pages:
    batch, columns = bounds.shape[0], bounds.shape[-1]
    rows = batch * heads
    bounds = bounds.reshape(batch, 1, columns).expand(batch, heads, columns).reshape(rows, columns)
    size = page_size_of(tokens) if columns == 2 else 1
    pages = tokens // size
    table = torch.arange(rows * pages, dtype=torch.int32, device=bounds.device).view(rows, pages)
    if columns > 2:
        table = table + bounds[:, :1]  # entries past the sequence are never read
    return Pages(size, table, bounds[:, 1].contiguous())


def page_size_of(tokens: int) -> int:
    """Return the page size of a cache: one of four, so that caches of any length share kernels."""
    size = gcd(tokens, _PAGE_SIZE)
    return size if size >= _MIN_PAGE_SIZE else 1


def workspace_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return scratch for calls on the current stream; the ops of compiled code have their own."""
    if torch.compiler.is_compiling() or not tensor.is_cuda:
        return tensor.new_empty(128, dtype=torch.uint8)
    key = (tensor.device, torch.cuda.current_stream(tensor.device).cuda_stream)
    if key not in _workspaces:
        size = max_workspace_bytes(tensor.device)
        _workspaces[key] = torch.empty(size, dtype=torch.uint8, device=tensor.device)
    return _workspaces[key]
