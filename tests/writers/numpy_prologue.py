"""RMSNorm and rope of tokens in numpy, from their definitions, in fp32 and without fused products.

The squares of a norm are summed as a warp sums them: 16 neighbors by each lane, from the first
to the last, and then the lanes by halves of the warp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from tests.writers.numpy_rows import Floats

_ROTATED = 64


class Prologue(NamedTuple):
    """Arguments of a writer for RMSNorm, rope or both."""

    norm_weight: torch.Tensor | None = None
    norm_eps: float = 1e-6
    positions: torch.Tensor | None = None
    cos_sin_cache: torch.Tensor | None = None

    def words(self, device: str | torch.device) -> dict[str, Any]:
        """Return the arguments that are given, on a device."""
        given = {name: value for name, value in self._asdict().items() if value is not None}
        return {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in given.items()
        }

    def of(self, tokens: torch.Tensor, normalized_elements: int = 512) -> torch.Tensor:
        """Return tokens ``[n, d]`` normalized and rotated; every NaN of them is the same."""
        done = tokens.detach().cpu().clone()
        with np.errstate(all="ignore"):
            for index in range(len(done)):
                if self.norm_weight is not None:
                    weight = self.norm_weight.detach().cpu().float().numpy()
                    numbers = done[index, :normalized_elements].float().numpy()
                    normalized = normalize(numbers, weight, np.float32(self.norm_eps))
                    done[index, :normalized_elements] = torch.from_numpy(normalized).to(done.dtype)
                if self.positions is not None and self.cos_sin_cache is not None:
                    position = int(self.positions[index])
                    table = self.cos_sin_cache.detach().cpu().numpy()
                    is_valid = 0 <= position < len(table)
                    angles = table[position] if is_valid else np.full(_ROTATED, np.nan, np.float32)
                    rotated = rotate(done[index, -_ROTATED:].float().numpy(), angles)
                    done[index, -_ROTATED:] = torch.from_numpy(rotated).to(done.dtype)
        return torch.where(done.isnan(), torch.tensor(float("nan"), dtype=done.dtype), done)


NOTHING = Prologue()


def normalize(numbers: Floats, weight: Floats, eps: np.float32) -> Floats:
    """Return numbers divided by the root of their mean square, times a weight."""
    lanes = [_sum_of_squares(numbers[start : start + 16]) for start in range(0, len(numbers), 16)]
    step = len(lanes) // 2
    while step:
        lanes = [lanes[lane] + lanes[lane ^ step] for lane in range(len(lanes))]
        step //= 2
    mean = lanes[0] / np.float32(len(numbers))
    inverse = np.float32(1) / np.sqrt(mean + eps)
    return np.asarray(numbers * inverse * weight, np.float32)


def _sum_of_squares(numbers: Floats) -> np.float32:
    total: np.float32 = np.float32(0)
    for number in numbers:
        total = np.float32(total + number * number)
    return total


def rotate(numbers: Floats, table: Floats) -> Floats:
    """Return numbers, each two neighbors of them rotated by an angle of their own."""
    rotated = np.empty_like(numbers)
    for pair in range(len(numbers) // 2):
        cosine, sine = table[pair], table[pair + len(numbers) // 2]
        even, odd = numbers[2 * pair], numbers[2 * pair + 1]
        rotated[2 * pair] = even * cosine - odd * sine
        rotated[2 * pair + 1] = even * sine + odd * cosine
    return rotated
