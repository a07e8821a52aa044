"""Measurements of cases against the roofline bound, and the JSON document of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Protocol

from mlagen import __version__

from .cases import Case
from .suites import MODES


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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one library in a case: time and error, or a problem."""

    us: float | None = None
    error: float | None = None
    problem: str | None = None

    def is_right(self, case: Case) -> bool:
        """Whether there is a result within the error bound of the case."""
        return self.us is not None and self.error is not None and self.error <= case.error_bound


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A case in one mode, with the outcome of each baseline that serves it."""

    case: Case
    mode: str
    input_sets: int
    mlagen: Outcome
    baselines: Mapping[str, Outcome] = field(default_factory=dict)


# Objects of the document, with their fields in order; docs/reference/cli.md has their meaning. A
# list has items of one type, and a dict of the name ``...`` values of one type.
RESULT: dict[Any, Any] = {
    **dict.fromkeys(("us", "tflop_s", "gb_s", "roofline_share", "error"), float | None),
    "is_right": bool,
    "problem": str | None,
}
CASE: dict[Any, Any] = {
    **dict.fromkeys(("case", "mode", "family"), str),
    **dict.fromkeys(("batch", "seq_len"), int),
    "is_ragged": bool,
    **dict.fromkeys(("tokens", "q_len", "heads", "kv_heads", "head_dim_qk", "head_dim_vo"), int),
    **dict.fromkeys(("page_size", "top_k", "window_left", "compress_ratio"), int),
    **dict.fromkeys(("dtype", "kv_dtype"), str),
    **dict.fromkeys(("flop", "bytes"), int),
    **dict.fromkeys(("flop_per_byte", "roofline_us"), float),
    "bound_by": str,
    "error_bound": float,
    "input_sets": int,
    "mlagen": RESULT,
    "baselines": {...: RESULT},
    "best_baseline": str | None,
    "ratio": float | None,
}
BENCH: dict[Any, Any] = {
    "mlagen": str,
    "commit": str | None,
    "gpu": str,
    "driver": str | None,
    **dict.fromkeys(("power_limit_w", "max_sm_mhz", "max_memory_mhz"), float | None),
    "torch": str,
    "nvrtc": str | None,
    "baselines": {...: str},
    "ceilings": {"read_gb_s": float, "bf16_tflop_s": float, "fp8_tflop_s": float | None},
    "cases": [CASE],
}


def document_of(
    facts: Mapping[str, Any], ceilings: Ceilings, measured: Sequence[Measured]
) -> dict[str, Any]:
    """Return the benchmark as JSON data."""
    return {
        "mlagen": __version__,
        **facts,
        "ceilings": asdict(ceilings),
        "cases": [_case_document(each, ceilings) for each in measured],
    }


def _case_document(measured: Measured, ceilings: Ceilings) -> dict[str, Any]:
    case, ours = measured.case, measured.mlagen
    right = [
        (outcome.us, name)
        for name, outcome in measured.baselines.items()
        if outcome.us is not None and outcome.is_right(case)
    ]
    best_us, best = min(right) if right else (None, None)
    made = {
        "case": case.label,
        "mode": measured.mode,
        "dtype": str(case.dtype),
        "kv_dtype": str(case.kv_dtype),
        "bytes": case.moved_bytes,
        "roofline_us": ceilings.bound_us(case),
        "bound_by": ceilings.bound_by(case),
        "input_sets": measured.input_sets,
        "mlagen": _outcome_document(ours, case, ceilings),
        "baselines": {
            name: _outcome_document(outcome, case, ceilings)
            for name, outcome in measured.baselines.items()
        },
        "best_baseline": best,
        "ratio": best_us / ours.us if ours.is_right(case) and best_us and ours.us else None,
    }
    # The other fields are properties of the case.
    return {name: made[name] if name in made else getattr(case, name) for name in CASE}


def _outcome_document(outcome: Outcome, case: Case, ceilings: Ceilings) -> dict[str, Any]:
    us = outcome.us
    return {
        "us": us,
        "tflop_s": None if us is None else case.flop / us / 1e6,
        "gb_s": None if us is None else case.moved_bytes / us / 1e3,
        "roofline_share": None if us is None else ceilings.bound_us(case) / us,
        "error": outcome.error,
        "is_right": outcome.is_right(case),
        "problem": outcome.problem,
    }


class Machine(Protocol):
    """A device that measures: a GPU, or a fake in tests."""

    def facts(self) -> dict[str, Any]:
        """Return the GPU with its limits, and the versions of the software."""

    def ceilings(self, *, with_fp8: bool) -> Ceilings:
        """Measure the peak rates of the GPU; the FP8 rate only on request."""

    def measure(self, case: Case, modes: Sequence[str]) -> list[Measured]:
        """Measure a case in some states of the GPU; a failure is part of the results."""


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
    """Measure the ceilings, then each case in all modes, and return the document, mode by mode."""
    total = 1 + len(cases) * len(modes)
    on_step(Step(name="ceilings", done=0, total=total))
    ceilings = machine.ceilings(with_fp8=any(case.is_fp8_math for case in cases))
    on_step(Step(name="ceilings", done=1, total=total, line=ceilings_text(ceilings)))
    by_mode: dict[str, list[Measured]] = {mode: [] for mode in modes}
    done = 1
    for case in cases:
        on_step(Step(name=case.label, done=done, total=total))
        for measured in machine.measure(case, modes):
            by_mode[measured.mode].append(measured)
            name = case.label if len(modes) == 1 else f"{case.label}, {measured.mode}"
            done += 1
            line = f"{_verdict(measured)}  {name}"
            on_step(Step(name=name, done=done, total=total, line=line))
    return document_of(machine.facts(), ceilings, [*chain(*by_mode.values())])


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
