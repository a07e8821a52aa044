"""A static cache as pages: views of where it lies, block tables, and scratch of the calls."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from math import gcd

import torch

from mlagen import max_workspace_bytes

PAGE_SIZE = 64  # the KV block of the sm90 kernels
_MIN_PAGE_SIZE = 16  # smaller pages take the sm80 kernels, which read pages of one token as well

_PAGES = "_mlagen_pages"  # an attribute of the bounds
_MAX_KEPT = 64  # of a thread: pages of that many shapes of a cache

_workspaces: dict[tuple[torch.device, int], torch.Tensor] = {}


@dataclass(eq=False)
class Pages:
    """The block tables of the sequences in a cache ``[batch, heads, tokens, ...]``."""

    size: int
    stride: int  # tokens from a page to the next; less than the size where pages overlap
    block_tables: torch.Tensor  # int32 [batch * heads, pages]
    seq_lens: torch.Tensor  # int32 [batch * heads]
    workspace: torch.Tensor
    bounds: torch.Tensor | None = None  # whose tables and lengths are in kept memory
    described: str = field(init=False)

    def __post_init__(self) -> None:
        """Put the page size into words."""
        is_single = self.size == 1
        self.described = "pages of one token" if is_single else f"pages of {self.size} tokens"

    def of(self, cache: torch.Tensor) -> torch.Tensor:
        """Return a cache as ``[pages, 1, size, width]``, in place."""
        cache, width, size = cache.contiguous(), cache.shape[-1], self.size
        if self.stride == size:
            return cache.view(-1, 1, size, width)
        shape = (cache.numel() // width - size + 1, 1, size, width)
        return cache.as_strided(shape, (self.stride * width, size * width, width, 1))


class _Kept(threading.local):
    """Pages of this thread's last steps, whose memory the next step takes."""

    def __init__(self) -> None:
        self.pages: dict[tuple[object, ...], Pages] = {}


_kept = _Kept()


def pages_of(bounds: torch.Tensor, tokens: int, heads: int) -> Pages:
    """Return the pages of a static cache ``[batch, heads, tokens, ...]``.

    A KV head of a sequence is a sequence by itself, so that its pages are contiguous whatever their
    size. All layers of a step have the same bounds, and share their pages. The next step has its
    tables and lengths in the same memory: a launch is replayed by its addresses. A graph, and
    compiled code, have their own.
    """
    if torch.compiler.is_compiling():
        return _pages_of(bounds, tokens, heads, *_aligned(bounds, tokens))
    if type(bounds) is not torch.Tensor or is_capturing(bounds):
        return _pages_of(bounds, tokens, heads, *_layout(bounds, tokens))
    known: dict[tuple[int, int], Pages] = bounds.__dict__.setdefault(_PAGES, {})
    pages = known.get((tokens, heads))
    # Another step of this thread may have come since the last layer of this one.
    if pages is None or pages.bounds is not bounds:
        pages = known[tokens, heads] = _in_kept_memory(bounds, tokens, heads)
    return pages


def is_capturing(tensor: torch.Tensor) -> bool:
    """Return whether a graph captures what is computed from a tensor, which is of that graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _in_kept_memory(bounds: torch.Tensor, tokens: int, heads: int) -> Pages:
    size, stride = _layout(bounds, tokens)
    key = (
        *(bounds.device, _stream_of(bounds), torch.is_inference_mode_enabled()),
        *(bounds.shape, tokens, heads, stride),
    )
    pages = _kept.pages.get(key)
    if pages is None:
        if len(_kept.pages) >= _MAX_KEPT:
            _kept.pages.clear()
        pages = _kept.pages[key] = _pages_of(bounds, tokens, heads, size, stride)
    else:
        pages.seq_lens.view(-1, heads).copy_(bounds[:, 0, :, 1])
        if stride != size or bounds.shape[-1] > 2:
            pages.block_tables.copy_(_block_tables(bounds, tokens, heads, size, stride))
    pages.bounds = bounds
    return pages


def _pages_of(bounds: torch.Tensor, tokens: int, heads: int, size: int, stride: int) -> Pages:
    tables = _block_tables(bounds, tokens, heads, size, stride)
    seq_lens = bounds[:, 0, :, 1].repeat(1, heads).view(-1)
    return Pages(size, stride, tables, seq_lens, workspace_of(bounds))


def _layout(bounds: torch.Tensor, tokens: int) -> tuple[int, int]:
    """Return the page size of a cache, and the tokens from a page to the next."""
    if bounds.shape[-1] == 3 or tokens < PAGE_SIZE:
        return _aligned(bounds, tokens)
    is_aligned = bounds.shape[-1] == 2 and tokens % PAGE_SIZE == 0
    return PAGE_SIZE, PAGE_SIZE if is_aligned else 1


def _aligned(bounds: torch.Tensor, tokens: int) -> tuple[int, int]:
    """Return the layout without overlap, for a compiler may copy a view of the cache."""
    size = gcd(tokens, PAGE_SIZE) if bounds.shape[-1] == 2 else 1
    size = size if size >= _MIN_PAGE_SIZE else 1
    return size, size


def _block_tables(
    bounds: torch.Tensor, tokens: int, heads: int, size: int, stride: int
) -> torch.Tensor:
    """Return the page ids of each row, a KV head of a sequence.

    Pages that overlap begin at any token. All of them must lie in the cache, although the last page
    of a sequence is not full. One query token attends to its tokens in any order, so that page has
    the first tokens of the sequence, and the full pages before it have the others.
    """
    batch, columns, device = bounds.shape[0], bounds.shape[-1], bounds.device
    rows = torch.arange(0, batch * heads * tokens, tokens, dtype=torch.int32, device=device)
    page = torch.arange(0, tokens, size, dtype=torch.int32, device=device)
    first, count = bounds[:, 0, :, 0:1], bounds[:, 0, :, 1:2]
    if stride != size:
        rest = count % size
        page = torch.where(page < count - rest, page + rest, 0)
    if columns > 2:
        page = page + first  # entries past the sequence are never read
    starts: torch.Tensor = rows.view(batch, heads, 1) + page
    return (starts // stride).view(batch * heads, -1)


def _stream_of(tensor: torch.Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def workspace_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return scratch for calls on the current stream; the ops of compiled code have their own."""
    if torch.compiler.is_compiling() or not tensor.is_cuda:
        return tensor.new_empty(128, dtype=torch.uint8)
    key = (tensor.device, torch.cuda.current_stream(tensor.device).cuda_stream)
    if key not in _workspaces:
        size = max_workspace_bytes(tensor.device)
        _workspaces[key] = torch.empty(size, dtype=torch.uint8, device=tensor.device)
    return _workspaces[key]
