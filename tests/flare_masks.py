"""Masks of flare_mla_decoding, each with its definition in plain Python."""

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

SCALE = 0.07

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


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A mask, and its bias for sequence, head, query position and key position."""

    mask: Callable[[int, int, str], Mask]  # from batch, heads, device
    adds: Callable[[int, int, int, int], float]

    def bias(self, seq: int, heads: int, position: int, length: int) -> torch.Tensor:
        """Return the bias of the scores ``[heads, length]`` of a token at ``position``."""
        return torch.tensor(
            [
                [self.adds(seq, head, position, key) for key in range(length)]
                for head in range(heads)
            ],
            dtype=torch.float64,
        ).view(heads, length)


def mask_by_position(mask: Mask, rule: Callable[[int, int], bool]) -> Rule:
    """Return a mask that depends only on the positions of query and key."""
    return Rule(mask=lambda *_: mask, adds=lambda _r, _h, q, k: 0.0 if rule(q, k) else -math.inf)


def _added(seq: int, head: int, position: int, key: int) -> float:
    row = position - (KEYS - ROWS)
    if not (0 <= row < ROWS and key < KEYS):
        return -math.inf
    return float(_NUMBERS[seq, head, row, key])


_NUMBERS = numbers(6, 64)


def _window(size: int) -> Callable[[int, int], bool]:
    return lambda q, k: q - size < k <= q


MASKS = {
    "all": mask_by_position(NullMask(), lambda _q, _k: True),
    "causal": mask_by_position(CausalMask(), lambda q, k: k <= q),
    "window of 3": mask_by_position(SlidingWindowCausalMask(3), _window(3)),
    "window of 1": mask_by_position(SlidingWindowCausalMask(1), _window(1)),
    "window of 50": mask_by_position(SlidingWindowCausalMask(50), _window(50)),
    "window, later ones too": mask_by_position(
        SlidingWindowNonCausalMask(20), lambda q, k: k > q - 20
    ),
    "chunks of 8": mask_by_position(ChunkedMask(8), lambda q, k: q // 8 == k // 8),
    "causal chunks of 32": mask_by_position(
        ChunkedCausalMask(32), lambda q, k: q // 32 == k // 32 and k <= q
    ),
    "causal without padding": Rule(
        mask=lambda batch, _heads, device: CausalPaddingMask(
            torch.tensor(VALID[:batch], dtype=torch.int32).to(device)
        ),
        adds=lambda r, _h, q, k: 0.0 if k <= q and k < VALID[r] else -math.inf,
    ),
    "numbers of each head": Rule(
        mask=lambda batch, heads, device: MaterializedMask(numbers(batch, heads).to(device)),
        adds=_added,
    ),
    "numbers of all heads": Rule(
        mask=lambda batch, _heads, device: MaterializedMask(
            numbers(batch, 1)[:, 0].contiguous().to(device), start_pos=KEYS - ROWS
        ),
        adds=lambda r, _h, q, k: _added(r, 0, q, k),
    ),
    "either of two": mask_by_position(
        AndMask(SlidingWindowCausalMask(3), OrMask(ChunkedMask(16), CausalMask())),
        lambda q, k: _window(3)(q, k) or (q // 16 == k // 16 and k <= q),
    ),
    "both of two": mask_by_position(
        OrMask(SlidingWindowNonCausalMask(30), CausalMask()), lambda q, k: q - 30 < k <= q
    ),
    "numbers, in a window": Rule(
        mask=lambda batch, heads, device: OrMask(
            MaterializedMask(numbers(batch, heads).to(device)), SlidingWindowCausalMask(20)
        ),
        adds=lambda r, h, q, k: _added(r, h, q, k) if q - 20 < k <= q else -math.inf,
    ),
    "the larger number": Rule(
        mask=lambda batch, heads, device: AndMask(
            SlidingWindowCausalMask(4), MaterializedMask(numbers(batch, heads).to(device))
        ),
        adds=lambda r, h, q, k: max(_added(r, h, q, k), 0.0 if q - 4 < k <= q else -math.inf),
    ),
}
