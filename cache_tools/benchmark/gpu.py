"""Benchmark measurements on the current GPU."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, TypeAlias

import torch

from mlagen.compiler.toolchain import find_nvrtc
from mlagen.errors import MlagenError

from .baselines.baseline import Baseline
from .calls import Call, mlagen_call
from .cases import Case
from .inputs import Inputs, relative_error
from .outcomes import Ceilings, Measured, Outcome
from .pools import expected_of, inputs_for
from .timing import Replays

# Much larger than any L2 cache.
_READ_BYTES = 4 << 30
_READ_WIDTH = 1 << 14

_GEMM_SIZE = 8192
_ROUNDS = 3
_HAS_FP8 = (8, 9)

_DETAIL_LENGTH = 160

# Facts of the document, by field of nvidia-smi.
_SMI_FIELDS = {
    "driver": "driver_version",
    "power_limit_w": "power.limit",
    "max_sm_mhz": "clocks.max.sm",
    "max_memory_mhz": "clocks.max.memory",
}

Make: TypeAlias = Callable[[Inputs], Call]


class Gpu:
    """The current GPU; measures mlagen and the baselines."""

    def __init__(self, baselines: Sequence[Baseline] = ()) -> None:
        self._baselines = baselines

    def facts(self) -> dict[str, Any]:
        """Return the GPU with its limits, and the versions of the software."""
        smi = smi_facts(torch.cuda.current_device())
        return {
            "commit": commit(),
            "gpu": torch.cuda.get_device_name(),
            **smi,
            "torch": torch.__version__,
            "nvrtc": find_nvrtc().version,
            "baselines": {each.name: each.version for each in self._baselines},
        }

    def ceilings(self, *, with_fp8: bool) -> Ceilings:
        """Measure read bandwidth and GEMM throughput."""
        with_fp8 = with_fp8 and torch.cuda.get_device_capability() >= _HAS_FP8
        ceilings = Ceilings(
            read_gb_s=_read_gb_s(),
            bf16_tflop_s=_bf16_tflop_s(),
            fp8_tflop_s=_fp8_tflop_s() if with_fp8 else None,
        )
        torch.cuda.empty_cache()
        return ceilings

    def measure(self, case: Case, modes: Sequence[str]) -> list[Measured]:
        """Measure a case in some modes; a failure is part of the results.

        The libraries are timed in turn, twice, the second time in reverse: none has the cooler GPU.
        """
        makes: dict[str, Make] = {"mlagen": mlagen_call}
        makes |= {each.name: each.make for each in self._baselines if each.serves(case)}
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        sets = case.input_sets(gpu.L2_cache_size)
        try:
            inputs = inputs_for(case, sets, "cuda")
            expected = expected_of(inputs)
        except RuntimeError as error:  # mostly out of memory
            outcomes = [dict.fromkeys(makes, Outcome(problem=_problem_of(error)))] * len(modes)
        else:
            outcomes = outcomes_of(makes, inputs, expected, modes)
            del inputs, expected
        torch.cuda.empty_cache()
        return [
            Measured(
                case=case,
                mode=mode,
                input_sets=sets,
                mlagen=found["mlagen"],
                baselines={name: found[name] for name in makes if name != "mlagen"},
            )
            for mode, found in zip(modes, outcomes, strict=True)
        ]


def outcomes_of(
    makes: dict[str, Make], inputs: Inputs, expected: torch.Tensor, modes: Sequence[str]
) -> list[dict[str, Outcome]]:
    """Compare the output of each first call with ``expected``, and time the next calls by mode."""
    first, timed = dict[str, Outcome](), dict[str, Replays]()
    for name, make in makes.items():
        first[name], replays = _first_outcome(make, inputs, expected)
        if replays is not None:
            timed[name] = replays
    return [_timed_outcomes(first, timed, mode) for mode in modes]


def _timed_outcomes(
    first: dict[str, Outcome], timed: dict[str, Replays], mode: str
) -> dict[str, Outcome]:
    outcomes = dict(first)
    times: dict[str, list[float]] = {name: [] for name in timed}
    for name in [*timed, *reversed(timed)]:
        if outcomes[name].problem is None:
            outcomes[name] = _timed_outcome(outcomes[name], timed[name], mode, times[name])
    return outcomes


def _first_outcome(
    make: Make, inputs: Inputs, expected: torch.Tensor
) -> tuple[Outcome, Replays | None]:
    """Return the error of the first call, and what times the next ones."""
    try:
        call = make(inputs)
        error = relative_error(call(0), expected)
        if not math.isfinite(error):
            problem = "result: expected finite numbers, got NaN or infinity"
            return Outcome(problem=problem), None
        return Outcome(error=error), Replays(call, inputs.sets)
    except Exception as error:  # noqa: BLE001 - any failure is reported, and the next case runs
        return Outcome(problem=_problem_of(error)), None


def _timed_outcome(first: Outcome, replays: Replays, mode: str, times: list[float]) -> Outcome:
    """Return the outcome with the mean of its times so far."""
    try:
        times.append(replays.median_us(mode))
    except Exception as error:  # noqa: BLE001 - the same
        return Outcome(problem=_problem_of(error))
    us = mean(times)
    if us <= 0:  # the projection in front of a small call, which is subtracted, took longer
        return Outcome(problem=f"time: expected more than 0 us, got {us:.1f}")
    return replace(first, us=us)


def smi_facts(index: int) -> dict[str, Any]:
    """Return driver, power cap and clocks as nvidia-smi reports them; None for what it does not."""
    facts: dict[str, Any] = dict.fromkeys(_SMI_FIELDS)
    query = f"--query-gpu={','.join(_SMI_FIELDS.values())}"
    # nvidia-smi does not know CUDA_VISIBLE_DEVICES, so the index may be that of another GPU.
    which = f"--id=GPU-{torch.cuda.get_device_properties(index).uuid}"
    command = ["nvidia-smi", query, which, "--format=csv,noheader,nounits"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return facts
    for name, value in zip(facts, ran.stdout.strip().split(", "), strict=False):
        facts[name] = value if name == "driver" else _number(value)
    return facts


def commit() -> str | None:
    """Return the commit of the checkout that runs, or None outside of one."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    if not (root / ".git").exists():
        return None
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.strip() or None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # such as [N/A]
        return None


def _problem_of(error: Exception) -> str:
    first_line = str(error).partition("\n")[0][:_DETAIL_LENGTH]
    return first_line if isinstance(error, MlagenError) else f"{type(error).__name__}: {first_line}"


def _read_gb_s() -> float:
    free, _ = torch.cuda.mem_get_info()
    rows = min(_READ_BYTES, free // 8) // (4 * _READ_WIDTH)
    numbers = torch.randn(rows, _READ_WIDTH, device="cuda")
    vector = torch.randn(_READ_WIDTH, device="cuda")
    # torch has no pure read; which of these is fastest depends on its version and the GPU.
    reads: tuple[Callable[[int], object], ...] = (
        lambda _: torch.sum(numbers),
        lambda _: torch.amax(numbers),
        lambda _: torch.sum(numbers, dim=1),
        lambda _: torch.mv(numbers, vector),
    )
    return numbers.nbytes / min(_fastest_us(read) for read in reads) / 1e3


def _bf16_tflop_s() -> float:
    a, b, out = (_square() for _ in range(3))
    return _gemm_tflop_s(lambda _: torch.mm(a, b, out=out))


def _fp8_tflop_s() -> float:
    a, b = (_square().to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    return _gemm_tflop_s(
        # The e4m3 GEMM has no public name in torch; its second operand is column-major.
        lambda _: torch._scaled_mm(  # noqa: SLF001
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )
    )


def _gemm_tflop_s(multiply: Callable[[int], object]) -> float:
    return 2 * _GEMM_SIZE**3 / _fastest_us(multiply) / 1e6


def _fastest_us(call: Callable[[int], object]) -> float:
    """Return the fastest of several times: power decides the clock within a few replays."""
    replays = Replays(call)
    return min(replays.median_us() for _ in range(_ROUNDS))


def _square() -> torch.Tensor:
    return torch.randn(_GEMM_SIZE, _GEMM_SIZE, device="cuda", dtype=torch.bfloat16)
