"""Masks of flare_mla_decoding, each with its definition in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mlagen.mla.masks import (
    AndMask,
    CausalMask,
    CausalPaddingMask,
    ChunkedCausalMask,
    ChunkedMask,
    Mask,
    MaterializedMask,
    NullMask,
    OrMask,
    SlidingWindowCausalMask,
    SlidingWindowNonCausalMask,
)

# Valid (not padding) tokens of sequences 0, 1, ...
VALID = (11, 0, 90, 7, 3, 1000)

# Rows of the bias; token Q of a sequence uses row Q - (keys - rows).
ROWS, KEYS = 40, 60


def numbers(batch: int, heads: int) -> torch.Tensor:
    """Return the bias of a materialized mask, part of which is minus infinity."""
    generator = torch.Generator().manual_seed(5)
    added = torch.randn(6, 64, ROWS, KEYS, generator=generator) * 2
    added[torch.rand(added.shape, generator=generator) < 0.3] = -math.inf
    return added[:batch, :heads]


@dataclass(frozen=True)
class Rule:
    """A mask, and the bias ``[heads or 1, keys]`` that it adds."""

    mask: Callable[[int, int, str], Mask]  # from batch, heads, device
    bias: Callable[[int, int, int, torch.Tensor], torch.Tensor]  # seq, heads, position, keys


def _shown(is_shown: torch.Tensor) -> torch.Tensor:
    return torch.where(is_shown, 0.0, -math.inf).double()[None]


def _by_position(mask: Mask, rule: Callable[[int, torch.Tensor], torch.Tensor]) -> Rule:
    """Return a mask that depends only on the positions of query and key."""
    return Rule(lambda *_: mask, lambda _seq, _heads, q, k: _shown(rule(q, k)))


_NUMBERS = numbers(6, 64).double()


def _added(seq: int, heads: int, position: int, keys: torch.Tensor) -> torch.Tensor:
    bias = torch.full((heads, len(keys)), -math.inf, dtype=torch.float64)
    row = position - (KEYS - ROWS)
    if 0 <= row < ROWS:
        bias[:, :KEYS] = _NUMBERS[seq, :heads, row, : len(keys)]
    return bias


def _window(size: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
    return lambda q, k: (k > q - size) & (k <= q)


def _of_numbers(other: Callable[[MaterializedMask], Mask]) -> Callable[[int, int, str], Mask]:
    return lambda batch, heads, device: other(MaterializedMask(numbers(batch, heads).to(device)))


MASKS = {
    "all": _by_position(NullMask(), lambda _, k: k >= 0),
    "causal": _by_position(CausalMask(), lambda q, k: k <= q),
    **{
        f"window of {size}": _by_position(SlidingWindowCausalMask(size), _window(size))
        for size in (3, 1, 50)
    },
    "window, later ones too": _by_position(SlidingWindowNonCausalMask(20), lambda q, k: k > q - 20),
    "chunks of 8": _by_position(ChunkedMask(8), lambda q, k: k // 8 == q // 8),
    "causal chunks of 32": _by_position(
        ChunkedCausalMask(32), lambda q, k: (k // 32 == q // 32) & (k <= q)
    ),
    "causal without padding": Rule(
        lambda batch, _, device: CausalPaddingMask(
            torch.tensor(VALID[:batch], dtype=torch.int32).to(device)
        ),
        lambda seq, _heads, q, k: _shown((k <= q) & (k < VALID[seq])),
    ),
    "numbers of each head": Rule(_of_numbers(lambda mask: mask), _added),
    "numbers of all heads": Rule(
        lambda batch, _, device: MaterializedMask(
            numbers(batch, 1)[:, 0].contiguous().to(device), start_pos=KEYS - ROWS
        ),
        lambda seq, _, q, k: _added(seq, 1, q, k),
    ),
    "either of two": _by_position(
        AndMask(SlidingWindowCausalMask(3), OrMask(ChunkedMask(16), CausalMask())),
        lambda q, k: _window(3)(q, k) | ((k // 16 == q // 16) & (k <= q)),
    ),
    "both of two": _by_position(
        OrMask(SlidingWindowNonCausalMask(30), CausalMask()), lambda q, k: (k > q - 30) & (k <= q)
    ),
    "numbers, in a window": Rule(
        _of_numbers(lambda mask: OrMask(mask, SlidingWindowCausalMask(20))),
        lambda seq, heads, q, k: _added(seq, heads, q, k) + _shown(_window(20)(q, k)),
    ),
    "the larger number": Rule(
        _of_numbers(lambda mask: AndMask(SlidingWindowCausalMask(4), mask)),
        lambda seq, heads, q, k: torch.maximum(_added(seq, heads, q, k), _shown(_window(4)(q, k))),
    ),
}
