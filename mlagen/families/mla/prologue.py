"""The prologue of a writer: RMSNorm and rope of tokens before they are quantized, in torch ops.

Sums have the order of the kernel's, so that every device gives the same bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from mlagen.spec.write_rows import WriteRowsSpec

_LANE_ELEMENTS = 16  # neighbors, whose squares a lane of the kernel sums


class Prologue(NamedTuple):
    """RMSNorm of the first elements of a token, and rope of its last ones, each if given."""

    norm_weight: torch.Tensor | None  # [value elements], of the dtype of the tokens
    positions: torch.Tensor | None  # int32 or int64 [n]
    cos_sin_cache: torch.Tensor | None  # fp32 [positions, rope elements]: cosines, then sines
    norm_eps: float

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """The tensors by kernel parameter."""
        return {
            "norm_weight": self.norm_weight,
            "positions": self.positions,
            "cos_sin_cache": self.cos_sin_cache,
        }

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers by kernel parameter."""
        positions, table = self.positions, self.cos_sin_cache
        return {
            "norm_eps": self.norm_eps,
            "num_positions": 0 if table is None else len(table),
            "has_wide_positions": positions is not None and positions.dtype is torch.int64,
        }

    def of(self, tokens: torch.Tensor, norm_elements: int) -> torch.Tensor:
        """Return tokens ``[m, d]``, their first elements normalized, and the last ones rotated.

        Each of the two rounds to the dtype of the tokens. Every NaN of a result is the same.
        """
        if self.norm_weight is not None:
            whole = tokens[:, :norm_elements].float()
            normalized = whole * self._inverse_rms(whole) * self.norm_weight.float()
            rest = tokens[:, norm_elements:]
            tokens = torch.cat([normalized.to(tokens.dtype), rest], dim=1)
        if self.cos_sin_cache is not None:
            split = tokens.shape[1] - WriteRowsSpec.rope_elements
            rotated = self._rotated(tokens[:, split:].float()).to(tokens.dtype)
            tokens = torch.cat([tokens[:, :split], rotated], dim=1)
        return tokens.masked_fill(tokens.isnan(), math.nan)

    def _inverse_rms(self, numbers: torch.Tensor) -> torch.Tensor:
        squares = numbers.square().view(len(numbers), -1, _LANE_ELEMENTS)
        sums = squares[..., 0]
        for index in range(1, _LANE_ELEMENTS):
            sums = sums + squares[..., index]
        while (half := sums.shape[1] // 2) > 0:
            sums = sums[:, :half] + sums[:, half:]
        mean = sums * (1.0 / numbers.shape[1])
        return (mean + self.norm_eps).sqrt().reciprocal()

    def _rotated(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers whose pairs of neighbors are rotated; NaN at an invalid position."""
        assert self.positions is not None
        assert self.cos_sin_cache is not None
        positions, count = self.positions[: len(numbers)].long(), len(self.cos_sin_cache)
        is_valid = (positions >= 0) & (positions < count)
        table = self.cos_sin_cache[torch.where(is_valid, positions, 0)]
        table = torch.where(is_valid[:, None], table, math.nan)
        cosines, sines = table.chunk(2, dim=1)
        even, odd = numbers[:, 0::2], numbers[:, 1::2]
        pairs = (even * cosines - odd * sines, even * sines + odd * cosines)
        return torch.stack(pairs, dim=2).flatten(1)
