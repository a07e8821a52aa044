"""The masks of flare_mla_decoding, each beside what it shows, said once more in plain Python."""

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

# Of requests 0, 1, ...: how many tokens are none of padding.
VALID = (11, 0, 90, 7, 3, 1000)

# Rows of the numbers that are added; token Q of a request takes row Q - (keys - rows).
ROWS, KEYS = 40, 60


def numbers(batch: int, heads: int) -> torch.Tensor:
    """Return the numbers that a materialized mask adds, some of which hide."""
    generator = torch.Generator().manual_seed(5)
    added = torch.randn(6, 64, ROWS, KEYS, generator=generator) * 2
    added[torch.rand(added.shape, generator=generator) < 0.3] = -math.inf
    return added[:batch, :heads]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A mask, and what it adds to the score of request, head, position of query and of key."""

    mask: Callable[[int, int, str], Mask]  # of batch, heads, device
    adds: Callable[[int, int, int, int], float]

    def bias(self, request: int, heads: int, position: int, length: int) -> torch.Tensor:
        """Return what is added to the scores ``[heads, length]`` of a token at ``position``."""
        return torch.tensor(
            [
                [self.adds(request, head, position, key) for key in range(length)]
                for head in range(heads)
            ],
            dtype=torch.float64,
        ).view(heads, length)


def shows(mask: Mask, rule: Callable[[int, int], bool]) -> Rule:
    """Return a mask that goes by the positions of query and key alone."""
    return Rule(mask=lambda *_: mask, adds=lambda _r, _h, q, k: 0.0 if rule(q, k) else -math.inf)


def _added(request: int, head: int, position: int, key: int) -> float:
    row = position - (KEYS - ROWS)
    if not (0 <= row < ROWS and key < KEYS):
        return -math.inf
    return float(_NUMBERS[request, head, row, key])


_NUMBERS = numbers(6, 64)


def _window(size: int) -> Callable[[int, int], bool]:
    return lambda q, k: q - size < k <= q


MASKS = {
    "all": shows(NullMask(), lambda _q, _k: True),
    "causal": shows(CausalMask(), lambda q, k: k <= q),
    "window of 3": shows(SlidingWindowCausalMask(3), _window(3)),
    "window of 1": shows(SlidingWindowCausalMask(1), _window(1)),
    "window of 50": shows(SlidingWindowCausalMask(50), _window(50)),
    "window, later ones too": shows(SlidingWindowNonCausalMask(20), lambda q, k: k > q - 20),
    "chunks of 8": shows(ChunkedMask(8), lambda q, k: q // 8 == k // 8),
    "causal chunks of 32": shows(ChunkedCausalMask(32), lambda q, k: q // 32 == k // 32 and k <= q),
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
    "either of two": shows(
        AndMask(SlidingWindowCausalMask(3), OrMask(ChunkedMask(16), CausalMask())),
        lambda q, k: _window(3)(q, k) or (q // 16 == k // 16 and k <= q),
    ),
    "both of two": shows(
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
