"""The prologue of a writer: RMSNorm and rope of tokens before they are quantized, in torch ops.

Sums have the order of the kernel's, so that every device gives the same bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from mlagen.spec.rows import RowFormat
from mlagen.spec.write_rows import WriteRowsSpec

_LANES = 32  # of a warp, which has a token: a lane sums neighbors


class Prologue(NamedTuple):
    """RMSNorm of the first elements of a token, and rope of its last ones, each if given."""

    norm_weight: torch.Tensor | None  # [value elements], of the dtype of the tokens
    positions: torch.Tensor | None  # int32 or int64 [n]
    cos_sin_cache: torch.Tensor | None  # fp32 [positions, rope elements]: cosines, then sines
    norm_eps: float

    def of(self, tokens: torch.Tensor, row: RowFormat) -> torch.Tensor:
        """Return tokens ``[m, d]`` of the rows of a format, normalized and rotated.

        Each of the two rounds to the dtype of the tokens. Every NaN of a result is the same.
        """
        if self.norm_weight is not None:
            whole = tokens[:, : row.value_elements].float()
            normalized = whole * self._inverse_rms(whole) * self.norm_weight.float()
            rest = tokens[:, row.value_elements :]
            tokens = torch.cat([normalized.to(tokens.dtype), rest], dim=1)
        if self.cos_sin_cache is not None:
            split = tokens.shape[1] - WriteRowsSpec.rope_elements
            rotated = self._rotated(tokens[:, split:].float()).to(tokens.dtype)
            tokens = torch.cat([tokens[:, :split], rotated], dim=1)
        return tokens.masked_fill(tokens.isnan(), math.nan)

    def _inverse_rms(self, numbers: torch.Tensor) -> torch.Tensor:
        squares = numbers.square().view(len(numbers), _LANES, -1)
        sums = squares[..., 0]
        for index in range(1, squares.shape[2]):
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
