"""Roofline bound of a case from measured peak rates of the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from .cases import Case


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Measured peak rates of a GPU; ``fp8_tflop_s`` is None if not measured."""

    read_gb_s: float
    bf16_tflop_s: float
    fp8_tflop_s: float | None = None

    def read_us(self, case: Case) -> float:
        """Return the time to move the bytes of a case."""
        return case.moved_bytes / self.read_gb_s / 1e3

    def math_us(self, case: Case) -> float:
        """Return the time to compute the GEMMs of a case."""
        rate = self.bf16_tflop_s
        if case.is_fp8_math and self.fp8_tflop_s is not None:
            rate = self.fp8_tflop_s
        return case.flop / rate / 1e6

    def bound_us(self, case: Case) -> float:
        """Return the roofline bound, the larger of the two times."""
        return max(self.read_us(case), self.math_us(case))

    def bound_by(self, case: Case) -> str:
        """Return the larger of the two, ``memory`` or ``math``."""
        return "memory" if self.read_us(case) >= self.math_us(case) else "math"
