"""Benchmark loop: runs the cases on a machine, and returns the document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

from .cases import Case
from .choices import MODES
from .outcomes import Measured, document_of
from .roofline import Ceilings


class Machine(Protocol):
    """A device that measures: a GPU, or a fake in tests."""

    def facts(self) -> dict[str, Any]:
        """Return the GPU with its limits, and the versions of the software."""

    def ceilings(self, *, with_fp8: bool) -> Ceilings:
        """Measure the peak rates of the GPU; the FP8 rate only on request."""

    def measure(self, case: Case, mode: str) -> Measured:
        """Measure a case in a state of the GPU; a failure is part of the result."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A part that starts, or, with a ``line``, has finished."""

    name: str
    done: int
    total: int
    line: str | None = None


def run_cases(
    cases: Sequence[Case],
    machine: Machine,
    on_step: Callable[[Step], None],
    modes: Sequence[str] = MODES[:1],
) -> dict[str, Any]:
    """Measure the ceilings, then each case in each mode, and return the document."""
    total = 1 + len(cases) * len(modes)
    on_step(Step(name="ceilings", done=0, total=total))
    ceilings = machine.ceilings(with_fp8=any(case.is_fp8_math for case in cases))
    on_step(Step(name="ceilings", done=1, total=total, line=ceilings_text(ceilings)))
    measured = []
    for done, (mode, case) in enumerate(product(modes, cases), start=1):
        name = case.label if len(modes) == 1 else f"{case.label}, {mode}"
        on_step(Step(name=name, done=done, total=total))
        measured.append(machine.measure(case, mode))
        line = f"{_verdict(measured[-1])}  {name}"
        on_step(Step(name=name, done=done + 1, total=total, line=line))
    return document_of(machine.facts(), ceilings, measured)


def ceilings_text(ceilings: Ceilings) -> str:
    """Return the ceilings on one line."""
    fp8 = ceilings.fp8_tflop_s
    return (
        f"read {ceilings.read_gb_s:.0f} GB/s, GEMM bf16 {ceilings.bf16_tflop_s:.0f}"
        f"{'' if fp8 is None else f' and e4m3 {fp8:.0f}'} TFLOP/s"
    )


def _verdict(measured: Measured) -> str:
    us = measured.mlagen.us
    if us is None:
        return f"{'failed':>12}"
    return f"{us:9.1f} us{'' if measured.mlagen.is_right(measured.case) else ', WRONG'}"
