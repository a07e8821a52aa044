"""A decode step over a static cache: its bounds, in place of a mask, and the cache as pages.

The record of what served each call is here too.

Bounds are int32 ``[batch, 1, 1, 2]``, the first token and the number of tokens. A third column
marks left padding, and a fourth that a whole page lies behind it, so that a shape alone chooses the
pages, also in compiled code. No such shape broadcasts against scores: a model that adds to its mask
fails, and is not silently wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any, NamedTuple, TypeVar

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from mlagen import max_workspace_bytes

PAGE_SIZE = 64  # the KV block of the sm90 kernels
_MIN_PAGE_SIZE = 16  # smaller pages take the sm80 kernels, which read pages of one token as well
_MIN_TOKENS = 16  # of a cache: more than bounds have columns
_INDEXER = "the indexer of the model reads it"
_OF_STEP = "_mlagen_of_step"  # an attribute of a tensor that all layers of a step get

_HINT = (
    "; kernels serve decode steps over a static cache (cache_implementation='static'), and "
    "mlagen.integrations.transformers.explain() counts the calls"
)
_calls: dict[str, int] = {}
_logger = logging.getLogger("mlagen")
_workspaces: dict[tuple[torch.device, int], torch.Tensor] = {}
_T = TypeVar("_T")


def record(served_by: str, *, is_missed: bool = False) -> None:
    """Count a call, and log the first one of its kind; compiled code is neither.

    A decode step that kernels could serve with other options, and sdpa does, is a warning.
    """
    if torch.compiler.is_compiling():
        return
    if served_by not in _calls:
        level = logging.WARNING if is_missed else logging.INFO
        _logger.log(level, "transformers: attention by %s%s", served_by, _HINT if is_missed else "")
    _calls[served_by] = _calls.get(served_by, 0) + 1


def explain() -> dict[str, int]:
    """Return how many attention calls each kernel served, and why ``sdpa`` served the others.

    Returns
    -------
    dict of str to int
        Calls outside of compiled code since the process began, such as ``{"mlagen GQA, pages of 64
        tokens": 64, "sdpa: more than one query token": 2}``. A model's layer is one call.
    """
    return dict(_calls)


class TopK(NamedTuple):
    """Where an indexer's tokens are, and how many of them a sequence attends to."""

    rows: torch.Tensor  # int32 [batch, 1, 1]: the first token of a sequence, of those of a cache
    bounds: torch.Tensor  # int32 [batch, 1, 1, 2]: masked tokens come last


class Pages(NamedTuple):
    """The block tables of the sequences in a cache ``[batch, heads, tokens, ...]``."""

    size: int
    stride: int  # tokens from a page to the next; less than the size where pages overlap
    block_tables: torch.Tensor  # int32 [batch * heads, pages]
    seq_lens: torch.Tensor  # int32 [batch * heads]

    @property
    def described(self) -> str:
        """The page size in words."""
        return "pages of one token" if self.size == 1 else f"pages of {self.size} tokens"

    def of(self, cache: torch.Tensor) -> torch.Tensor:
        """Return a cache as ``[pages, 1, size, width]``, in place."""
        cache, width, size = cache.contiguous(), cache.shape[-1], self.size
        if self.stride == size:
            return cache.view(-1, 1, size, width)
        shape = (cache.numel() // width - size + 1, 1, size, width)
        return cache.as_strided(shape, (self.stride * width, size * width, width, 1))


def once_a_step(tensor: torch.Tensor, key: tuple[object, ...], make: Callable[[], _T]) -> _T:
    """Return what ``make`` makes for the first layer of a step, kept with a tensor of the step.

    A tensor that is written has it made anew. Compiled code and a graph have their own.
    """
    if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor or is_capturing(tensor):
        return make()
    version = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
    known: tuple[int, dict[object, _T]] | None = tensor.__dict__.get(_OF_STEP)
    if known is None or known[0] != version:
        known = tensor.__dict__[_OF_STEP] = version, {}
    if key not in known[1]:
        known[1][key] = make()
    return known[1][key]


def is_capturing(tensor: torch.Tensor) -> bool:
    """Return whether a graph captures what is computed from a tensor, which is of that graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def workspace_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return scratch for calls on the current stream; the ops of compiled code have their own."""
    if torch.compiler.is_compiling() or not tensor.is_cuda:
        return tensor.new_empty(128, dtype=torch.uint8)
    key = (tensor.device, torch.cuda.current_stream(tensor.device).cuda_stream)
    if key not in _workspaces:
        size = max_workspace_bytes(tensor.device)
        _workspaces[key] = torch.empty(size, dtype=torch.uint8, device=tensor.device)
    return _workspaces[key]


def decode_mask(**arguments: Any) -> torch.Tensor | None:
    """Return the bounds of a decode step over a static cache, or the mask of ``sdpa``."""
    if arguments["q_length"] == 1:
        found = _unserved(**arguments) or _bounds_of(**arguments)
        if isinstance(found, torch.Tensor):
            return found
        # The layers of a model with an indexer say themselves what serves them.
        record(f"mask of sdpa: {found}", is_missed=found != _INDEXER)
    mask: torch.Tensor | None = sdpa_mask(**arguments)
    return mask


def is_bounds(mask: torch.Tensor | None) -> bool:
    """Return whether a mask has bounds; anything that a model derives from them has other axes."""
    return mask is not None and mask.dtype == torch.int32 and tuple(mask.shape[1:3]) == (1, 1)


def top_k_of(mask: torch.Tensor, batch: int, tokens: int, top_k: int) -> TopK:
    """Return where an indexer's ``top_k`` tokens of each sequence are, and how many count.

    ``mask`` is that of ``sdpa``, bool ``[batch or 1, 1, 1, tokens]``; the cache has ``tokens``.
    """
    make = partial(_top_k_of, mask, batch, tokens, top_k)
    if not torch.compiler.is_compiling() and mask.is_inference():  # without a count of writes
        return make()
    return once_a_step(mask, (batch, tokens, top_k), make)


def _top_k_of(mask: torch.Tensor, batch: int, tokens: int, top_k: int) -> TopK:
    rows = torch.arange(0, batch * tokens, tokens, dtype=torch.int32, device=mask.device)
    count = mask.expand(batch, 1, 1, -1).sum(-1, dtype=torch.int32).clamp(max=top_k)
    bounds = torch.stack([torch.zeros_like(count), count], dim=-1)
    return TopK(rows[:, None, None], bounds)


def bool_mask(bounds: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return bounds as bool ``[batch, 1, 1, tokens]``, for sdpa."""
    first, count = bounds[..., 0:1], bounds[..., 1:2]
    token = torch.arange(tokens, dtype=torch.int32, device=bounds.device)
    return (token >= first) & (token < first + count)


def _unserved(
    *,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    config: Any = None,
    **_: Any,
) -> str:
    """Return why a step of one query token has no bounds, empty if it has."""
    rules = (
        (kv_offset == 0 and mask_function is causal_mask_function, "not causal, or a window"),
        (getattr(config, "index_topk", None) is None, _INDEXER),
        (kv_length >= _MIN_TOKENS, f"a cache of fewer than {_MIN_TOKENS} tokens"),
    )
    for is_met, reason in rules:
        if not is_met:
            return reason
    if not isinstance(q_offset, torch.Tensor):  # a static layer counts its tokens on the device
        return "the cache has no fixed length"
    return ""


def _bounds_of(
    *,
    batch_size: int,
    q_offset: torch.Tensor,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor | str:
    """Return the bounds of a step, or why its padding has none."""
    ends = (q_offset + 1).int().expand(batch_size)
    columns = [torch.zeros_like(ends), ends]
    if attention_mask is not None:
        if torch.compiler.is_compiling() or is_capturing(attention_mask):
            return "a 2-D attention mask in compiled or captured code"
        if not bool(attention_mask.all()):
            width = attention_mask.shape[1]
            first = attention_mask.int().argmax(-1).int()
            # What follows the padding reaches the end, and the end is the token of this step.
            reaches_end = (attention_mask.sum(-1) + first == width).all() & (ends == width).all()
            is_before_page = (first + PAGE_SIZE <= kv_length).all()
            are = torch.stack([reaches_end, is_before_page]).tolist()
            if not are[0]:
                return "padding that is not left"
            columns = [first, ends - first, *[torch.ones_like(ends)] * (2 if are[1] else 1)]
    return torch.stack(columns, dim=-1)[:, None, None]


def pages_of(bounds: torch.Tensor, tokens: int, heads: int) -> Pages:
    """Return the pages of a static cache ``[batch, heads, tokens, ...]``.

    A KV head of a sequence is a sequence by itself, so that its pages are contiguous whatever their
    size. All layers of a step have the same bounds, and share their pages.
    """
    return once_a_step(bounds, (tokens, heads), partial(_pages_of, bounds, tokens, heads))


def _pages_of(bounds: torch.Tensor, tokens: int, heads: int) -> Pages:
    size, stride = _layout(bounds, tokens)
    tables = _block_tables(bounds, tokens, heads, size, stride)
    return Pages(size, stride, tables, bounds[:, 0, :, 1].repeat(1, heads).view(-1))


def _layout(bounds: torch.Tensor, tokens: int) -> tuple[int, int]:
    """Return the page size of a cache, and the tokens from a page to the next.

    Pages of compiled code do not overlap, for a compiler may copy a view of the cache.
    """
    columns = bounds.shape[-1]
    aligned = gcd(tokens, PAGE_SIZE) if columns == 2 else 1
    may_overlap = columns != 3 and tokens >= PAGE_SIZE and not torch.compiler.is_compiling()
    if may_overlap and aligned != PAGE_SIZE:
        return PAGE_SIZE, 1
    size = aligned if aligned >= _MIN_PAGE_SIZE else 1
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
