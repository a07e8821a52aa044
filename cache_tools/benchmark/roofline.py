"""The least time that a case can take on a GPU, from what was measured of that GPU."""

from __future__ import annotations

from dataclasses import dataclass

from .cases import Case


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What a GPU can do at the most, as measured; ``fp8_tflop_s`` is None where it was not."""

    read_gb_s: float
    bf16_tflop_s: float
    fp8_tflop_s: float | None = None

    def read_us(self, case: Case) -> float:
        """Return how long the bytes of a case take."""
        return case.moved_bytes / self.read_gb_s / 1e3

    def math_us(self, case: Case) -> float:
        """Return how long the products of a case take."""
        rate = self.bf16_tflop_s
        if case.is_fp8_math and self.fp8_tflop_s is not None:
            rate = self.fp8_tflop_s
        return case.flop / rate / 1e6

    def floor_us(self, case: Case) -> float:
        """Return the larger of the two: no call can be shorter."""
        return max(self.read_us(case), self.math_us(case))

    def bound_by(self, case: Case) -> str:
        """Return which of the two it is, ``memory`` or ``math``."""
        return "memory" if self.read_us(case) >= self.math_us(case) else "math"
