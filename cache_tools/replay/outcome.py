"""Result of a replay, and the schema of its JSON document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlagen import __version__

from ..output.schemas import DOCUMENT, Field, Schema
from .document import Dump

_UNKNOWN = "none: the process ended in this call"
NOTHING_COMPARED = "nothing compared: the call was on a GPU"

REPLAY: Schema = {
    DOCUMENT: {
        "file": Field("text", "the dump"),
        "entry": Field("text", "the entry point"),
        "mlagen": Field("text", "version of mlagen here"),
        "dumped": Field("`dumped`", "what the dump says of the call"),
        "device": Field("text", "name of the GPU, or `cpu`"),
        "contents": Field("text", "`dumped`, or `random` where the dump has metadata only"),
        "seed": Field("integer", "seed of random contents"),
        "served_by": Field("list of text", "the kernels, or `CPU backend`"),
        "error": Field("text or null", "what the call raised"),
        "relative_error": Field(
            "number or null",
            "in the Frobenius norm, against the CPU backend in fp32; null where that served the "
            "call, or the call raised",
        ),
        "error_bound": Field("number", "largest `relative_error` that counts as right"),
        "is_right": Field(
            "boolean or null",
            "whether the call returned, within the bound; null if a call of a GPU returned on CPU "
            "tensors",
        ),
    },
    "`dumped`": {
        "mlagen": Field("text or null", "version of mlagen"),
        "torch": Field("text or null", "version of torch"),
        "cuda": Field("text or null", "CUDA version of torch"),
        "driver": Field("text or null", "CUDA version of the driver"),
        "gpu": Field("text or null", "name of the GPU"),
        "is_captured": Field("boolean", "whether a CUDA graph was captured"),
        "served_by": Field("list of text", "the kernels, or `CPU backend`"),
        "error": Field("text or null", "what the call raised"),
    },
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a replayed call."""

    device: str  # name of the GPU, or cpu
    was_on_gpu: bool
    served_by: list[str]
    error: str | None
    relative_error: float | None
    error_bound: float

    @property
    def is_right(self) -> bool | None:
        """Whether the call returned, within the bound; None if its device is missing."""
        if self.error is None and self.lacks_gpu:
            return None
        is_within = self.relative_error is None or self.relative_error <= self.error_bound
        return self.error is None and is_within

    @property
    def lacks_gpu(self) -> bool:
        """Whether a call of a GPU ran on CPU tensors."""
        return self.was_on_gpu and self.device == "cpu"


def document_of(dump: Dump, outcome: Outcome, seed: int) -> dict[str, Any]:
    """Return the replay as JSON data."""
    return {
        "file": str(dump.path),
        "entry": dump.entry,
        "mlagen": __version__,
        "dumped": {
            **dump.versions,
            "gpu": dump.gpu,
            "is_captured": dump.is_captured,
            "served_by": dump.served_by,
            "error": dump.error,
        },
        "device": outcome.device,
        "contents": _contents(dump),
        "seed": seed,
        "served_by": outcome.served_by,
        "error": outcome.error,
        "relative_error": _finite(outcome.relative_error),
        "error_bound": outcome.error_bound,
        "is_right": outcome.is_right,
    }


def summary_of(dump: Dump, outcome: Outcome, seed: int) -> dict[str, str]:
    """Return the replay as named lines."""
    versions = (f"{name} {value}" for name, value in dump.versions.items() if value)
    random = f"random contents of seed {seed}"
    contents = "dumped contents" if dump.tensors else random
    device = "CPU tensors" if outcome.device == "cpu" else outcome.device
    reason = ", as there is no GPU here" if outcome.lacks_gpu else ""
    return {
        "call": dump.entry + (", captured" if dump.is_captured else ""),
        "dumped with": ", ".join([*versions, *([dump.gpu] if dump.gpu else [])]),
        "dumped result": dump.error or _served(dump.served_by) if dump.has_ended else _UNKNOWN,
        "replayed on": f"{device}{reason}, {contents}",
        "result": outcome.error or _served(outcome.served_by),
        "relative error": _error_text(outcome),
    }


def _served(kernels: list[str]) -> str:
    return ", ".join(kernels) or "returned"


def _error_text(outcome: Outcome) -> str:
    if outcome.error is not None:
        return "none: the call raised"
    if outcome.lacks_gpu:
        return "none: the kernels did not run"
    if outcome.relative_error is None:
        reason = "the CPU backend is the reference" if outcome.served_by else "no output"
        return f"none: {reason}"
    relation = "within" if outcome.is_right else "above"
    return f"{outcome.relative_error:.2g}, {relation} the bound of {outcome.error_bound:.2g}"


def _contents(dump: Dump) -> str:
    return "dumped" if dump.tensors else "random"


def _finite(value: float | None) -> float | None:
    return None if value is None else min(value, 1e308)  # JSON has no infinity
