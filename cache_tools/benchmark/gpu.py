"""Benchmark measurements on the current GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from mlagen.errors import MlagenError

from .calls import Call, mlagen_call
from .cases import Case
from .inputs import Inputs, make_inputs
from .outcomes import Measured, Outcome
from .peer import flashinfer_call, flashinfer_version
from .reference import attend, relative_error
from .roofline import Ceilings
from .timing import median_us

# Much larger than any L2 cache.
_READ_BYTES = 4 << 30

_GEMM_SIZE = 8192
_HAS_FP8 = (8, 9)

# If torch does not report it: the largest L2 of current GPUs.
_LARGE_L2_BYTES = 128 << 20

_DETAIL_LENGTH = 160


class Gpu:
    """The current GPU; measures mlagen, and FlashInfer if a backend of it is named."""

    def __init__(self, flashinfer_backend: str | None = None) -> None:
        self._backend = flashinfer_backend

    def facts(self) -> dict[str, str | None]:
        """Return the name of the GPU and the versions of the libraries."""
        return {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "flashinfer": None if self._backend is None else flashinfer_version(),
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

    def measure(self, case: Case) -> Measured:
        """Measure a case; a failure is part of the result."""
        sets = case.input_sets(_l2_bytes())
        try:
            inputs = make_inputs(case, sets, "cuda")
            expected = attend(inputs)
        except RuntimeError as error:  # mostly out of memory
            failed = Outcome(problem=_problem_of(error))
            theirs = failed if self._backend is not None else None
            return Measured(case=case, input_sets=sets, mlagen=failed, flashinfer=theirs)
        ours, theirs = outcome_of(mlagen_call, inputs, expected), None
        if self._backend is not None:
            make = partial(flashinfer_call, backend=self._backend)
            theirs = outcome_of(make, inputs, expected)
        del inputs, expected
        torch.cuda.empty_cache()
        return Measured(case=case, input_sets=sets, mlagen=ours, flashinfer=theirs)


def outcome_of(
    make: Callable[[Inputs], Call],
    inputs: Inputs,
    expected: torch.Tensor,
    timed: Callable[[Call, int], float] = median_us,
) -> Outcome:
    """Compare the output of the first call with ``expected``, and time the next calls."""
    try:
        call = make(inputs)
        error = relative_error(call(0), expected)
        if not math.isfinite(error):
            return Outcome(problem="result: expected finite numbers, got NaN or infinity")
        return Outcome(us=timed(call, inputs.sets), error=error)
    except Exception as error:  # noqa: BLE001 - any failure is reported, and the next case runs
        return Outcome(problem=_problem_of(error))


def _problem_of(error: Exception) -> str:
    first_line = str(error).partition("\n")[0][:_DETAIL_LENGTH]
    return first_line if isinstance(error, MlagenError) else f"{type(error).__name__}: {first_line}"


def _l2_bytes() -> int:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(getattr(properties, "L2_cache_size", _LARGE_L2_BYTES))


def _read_gb_s() -> float:
    free, _ = torch.cuda.mem_get_info()
    numbers = torch.randn(min(_READ_BYTES, free // 8) // 4, device="cuda")
    sum_us = median_us(lambda _: torch.sum(numbers))
    largest_us = median_us(lambda _: torch.amax(numbers))
    # torch has no pure read; which of these two reductions is faster depends on its version.
    return numbers.nbytes / min(sum_us, largest_us) / 1e3


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
    return 2 * _GEMM_SIZE**3 / median_us(multiply) / 1e6


def _square() -> torch.Tensor:
    return torch.randn(_GEMM_SIZE, _GEMM_SIZE, device="cuda", dtype=torch.bfloat16)
