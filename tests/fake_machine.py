"""Fake machine of the benchmark: fixed results without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cache_tools.benchmark.cases import Case
from cache_tools.benchmark.outcomes import Ceilings, Measured, Outcome, document_of
from cache_tools.benchmark.selection import case_of

RIGHT = Outcome(us=1000.0, error=1.7e-3)
WRONG = Outcome(us=1.0, error=0.5)
FAILED = Outcome(problem="RuntimeError: no memory")


@dataclass
class FakeMachine:
    """Returns ``mlagen`` and the baseline ``fa3`` for every case, and records the calls."""

    mlagen: Callable[[Case], Outcome] = lambda _: RIGHT
    fa3: Callable[[Case], Outcome] | None = None
    calls: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """Return the facts of a GPU."""
        return {
            "commit": "0123456789ab",
            "gpu": "NVIDIA H200",
            "driver": "580.1",
            "power_limit_w": 700.0,
            "max_sm_mhz": 1980.0,
            "max_memory_mhz": 3201.0,
            "torch": "2.11.0",
            "nvrtc": "13.0.88",
            "baselines": {} if self.fa3 is None else {"fa3": "vllm 0.23.0"},
        }

    def ceilings(self, *, with_fp8: bool) -> Ceilings:
        """Return round numbers."""
        self.calls.append("ceilings with fp8" if with_fp8 else "ceilings")
        fp8 = 1600.0 if with_fp8 else None
        return Ceilings(read_gb_s=4000.0, bf16_tflop_s=800.0, fp8_tflop_s=fp8)

    def measure(self, case: Case, modes: Sequence[str]) -> list[Measured]:
        """Return the fixed results."""
        self.calls += [f"{case.label}, {mode}" for mode in modes]
        return [
            Measured(
                case=case,
                mode=mode,
                input_sets=1,
                mlagen=self.mlagen(case),
                baselines={} if self.fa3 is None else {"fa3": self.fa3(case)},
            )
            for mode in modes
        ]


def results(mlagen: Outcome = RIGHT, **baselines: Outcome) -> dict[str, Any]:
    """Return the document of the default MLA case, as JSON has it."""
    measured = Measured(
        case=case_of("mla"), mode="fresh", input_sets=1, mlagen=mlagen, baselines=baselines
    )
    machine = FakeMachine()
    facts = machine.facts() | {"baselines": dict.fromkeys(baselines, "vllm 0.23.0")}
    found = document_of(facts, machine.ceilings(with_fp8=False), [measured])
    parsed: dict[str, Any] = json.loads(json.dumps(found, allow_nan=False))
    return parsed
