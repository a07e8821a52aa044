"""Measurements of cases, and the JSON document of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlagen import __version__

from .cases import Case
from .roofline import Ceilings


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one library in a case: time and error, or a problem."""

    us: float | None = None
    error: float | None = None
    problem: str | None = None

    def is_right(self, case: Case) -> bool:
        """Whether there is a result within the error bound of the case."""
        return self.error is not None and self.error <= case.error_bound


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A case with its measurements; ``flashinfer`` is None without a comparison."""

    case: Case
    input_sets: int
    mlagen: Outcome
    flashinfer: Outcome | None = None


# Schema of `mlagen bench --json`; docs/reference/cli.md shows it.
FIELDS: dict[str, dict[str, str]] = {
    "the document": {
        "mlagen": "version of mlagen",
        "gpu": "name of the GPU",
        "torch": "version of torch",
        "flashinfer": "version of FlashInfer, null without `--compare`",
        "ceilings": "peak rates of the GPU, measured in the same run",
        "cases": "one object per case, in the order of the table",
    },
    "`ceilings`": {
        "read_gb_s": "read-only bandwidth of a tensor larger than L2, 10^9 bytes a second",
        "bf16_tflop_s": "bf16 GEMM of 8192 x 8192 x 8192, 10^12 operations a second",
        "fp8_tflop_s": "the same in e4m3; null if no case has query and cache in e4m3, or the GPU "
        "has no FP8 MMA",
    },
    "each of `cases`": {
        "case": "the case in words",
        "family": "`mla` or `gqa`",
        "batch": "requests",
        "seq_len": "tokens per request, the mean if `is_ragged`",
        "is_ragged": "whether requests differ in length",
        "tokens": "cached tokens of all requests",
        "q_len": "query tokens per request",
        "heads": "query heads",
        "kv_heads": "KV heads, 1 for MLA",
        "head_dim_qk": "head dim of query and key",
        "head_dim_vo": "head dim of value and output",
        "page_size": "tokens per page",
        "dtype": "element type of the query",
        "kv_dtype": "element type of the cache",
        "flop": "multiplications and additions of the QK and PV GEMMs",
        "bytes": "bytes to read each cached token once, read the query and write the output",
        "flop_per_byte": "`flop` over `bytes`",
        "floor_us": "roofline bound: the larger of bytes over `read_gb_s` and FLOP over GEMM rate",
        "bound_by": "the larger of the two, `memory` or `math`",
        "error_bound": "largest `error` that counts as right",
        "input_sets": "number of input sets that the timed calls rotate through",
        "mlagen": "result of mlagen",
        "flashinfer": "result of FlashInfer, null without `--compare`",
        "ratio": "FlashInfer's time over mlagen's, above 1 if mlagen is faster; null unless both "
        "are right",
    },
    "`mlagen` and `flashinfer` of a case": {
        "us": "median time of a whole call in microseconds, null if there is none",
        "tflop_s": "`flop` over that time",
        "gb_s": "`bytes` over that time",
        "share_of_floor": "`floor_us` over that time: 1 is the roofline bound",
        "error": "relative error of the first call, in the Frobenius norm, against fp32",
        "is_right": "whether `error` is within `error_bound`",
        "problem": "why there is no result, null if there is one",
    },
}


def document_of(
    facts: dict[str, str | None], ceilings: Ceilings, measured: Sequence[Measured]
) -> dict[str, Any]:
    """Return the benchmark as JSON data; :data:`FIELDS` documents its names."""
    return {
        "mlagen": __version__,
        **facts,
        "ceilings": asdict(ceilings),
        "cases": [_case_document(each, ceilings) for each in measured],
    }


def _case_document(measured: Measured, ceilings: Ceilings) -> dict[str, Any]:
    case, ours, theirs = measured.case, measured.mlagen, measured.flashinfer
    return {
        "case": case.label,
        "family": case.family,
        "batch": case.batch,
        "seq_len": case.seq_len,
        "is_ragged": case.is_ragged,
        "tokens": case.tokens,
        "q_len": case.q_len,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_dim_qk": case.head_dim_qk,
        "head_dim_vo": case.head_dim_vo,
        "page_size": case.page_size,
        "dtype": str(case.dtype),
        "kv_dtype": str(case.kv_dtype),
        "flop": case.flop,
        "bytes": case.moved_bytes,
        "flop_per_byte": case.flop_per_byte,
        "floor_us": ceilings.floor_us(case),
        "bound_by": ceilings.bound_by(case),
        "error_bound": case.error_bound,
        "input_sets": measured.input_sets,
        "mlagen": _outcome_document(ours, case, ceilings),
        "flashinfer": None if theirs is None else _outcome_document(theirs, case, ceilings),
        "ratio": _ratio(case, ours, theirs),
    }


def _outcome_document(outcome: Outcome, case: Case, ceilings: Ceilings) -> dict[str, Any]:
    us = outcome.us
    return {
        "us": us,
        "tflop_s": None if us is None else case.flop / us / 1e6,
        "gb_s": None if us is None else case.moved_bytes / us / 1e3,
        "share_of_floor": None if us is None else ceilings.floor_us(case) / us,
        "error": outcome.error,
        "is_right": outcome.is_right(case),
        "problem": outcome.problem,
    }


def _ratio(case: Case, ours: Outcome, theirs: Outcome | None) -> float | None:
    if theirs is None or not (ours.is_right(case) and theirs.is_right(case)):
        return None
    assert ours.us is not None, "a right result has a time"
    assert theirs.us is not None, "a right result has a time"
    return theirs.us / ours.us
