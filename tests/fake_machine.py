"""Fake machine of the benchmark: fixed results without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cache_tools.benchmark.cases import Case
from cache_tools.benchmark.outcomes import Measured, Outcome
from cache_tools.benchmark.roofline import Ceilings

RIGHT = Outcome(us=1000.0, error=1.7e-3)
WRONG = Outcome(us=1.0, error=0.5)
FAILED = Outcome(problem="RuntimeError: no memory")


@dataclass
class FakeMachine:
    """Returns ``mlagen`` and ``flashinfer`` for every case, and records the calls."""

    mlagen: Callable[[Case], Outcome] = lambda _: RIGHT
    flashinfer: Callable[[Case], Outcome] | None = None
    calls: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, str | None]:
        """Return the facts of a GPU."""
        version = None if self.flashinfer is None else "0.7.2"
        return {"gpu": "NVIDIA H200", "torch": "2.11.0", "flashinfer": version}

    def ceilings(self, *, with_fp8: bool) -> Ceilings:
        """Return round numbers."""
        self.calls.append("ceilings with fp8" if with_fp8 else "ceilings")
        fp8 = 1600.0 if with_fp8 else None
        return Ceilings(read_gb_s=4000.0, bf16_tflop_s=800.0, fp8_tflop_s=fp8)

    def measure(self, case: Case) -> Measured:
        """Return the fixed results."""
        self.calls.append(case.label)
        theirs = None if self.flashinfer is None else self.flashinfer(case)
        return Measured(case=case, input_sets=1, mlagen=self.mlagen(case), flashinfer=theirs)
