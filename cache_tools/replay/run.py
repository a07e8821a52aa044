"""Run of a dumped call, compared with the CPU backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mlagen import __version__, decode, mla, msa_ops, sparse, xqa
from mlagen.errors import ArgumentError
from mlagen.gqa.plan import batch_decode_run
from mlagen.mla.run import batch_mla_run
from mlagen.observe.document import is_workspace
from mlagen.observe.observed import CPU_BACKEND
from mlagen.runtime.launch import record_launches
from mlagen.settings import current_settings

from ..benchmark.inputs import relative_error
from .dump import Dump, rebuilt, was_on_gpu

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        mla.trtllm_batch_decode_with_kv_cache_mla,
        mla.trtllm_batch_decode_sparse_mla_dsv4,
        mla.xqa_batch_decode_with_kv_cache_mla,
        mla.flare_mla_decoding,
        decode.xqa_batch_decode_with_kv_cache,
        decode.trtllm_batch_decode_with_kv_cache,
        msa_ops.msa_sparse_decode_attention,
        sparse.qsa_sparse_paged_attention,
        xqa.xqa,
        xqa.xqa_mla,
        batch_mla_run,
        batch_decode_run,
    )
}
_WRAPPERS: dict[str, Callable[..., Any]] = {
    wrapper.__name__: wrapper
    for wrapper in (mla.BatchMLAPagedAttentionWrapper, decode.BatchDecodeWithPagedKVCacheWrapper)
}
_METHODS = {
    f"{wrapper}.{name}": (wrapper, name)
    for wrapper in _WRAPPERS
    for name in ("__init__", "plan", "run")
}

# Settings of the dumped process that decide how a call runs.
_KERNEL_SETTINGS = (
    *("MLAGEN_BATCH_INVARIANT", "MLAGEN_CHECK"),
    *("MLAGEN_MLA_KERNEL", "MLAGEN_MLA_P_DTYPE", "MLAGEN_GQA_KERNEL"),
)

# Rounding of P and O to 16 bits, or of P to e4m3. `mlagen bench` allows more in 16 bits, for
# libraries that round partial outputs as well.
_BOUND, _FP8_BOUND = 4e-3, 5e-2

NOTHING_COMPARED = "nothing compared: the call was on a GPU"


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


def replay(dump: Dump) -> Outcome:
    """Run the call of a dump, on the GPU if it was on one and there is one.

    Raises ArgumentError if the dump cannot be rebuilt on this machine.
    """
    if dump.entry not in {*_FUNCTIONS, *_METHODS}:
        names = ", ".join((*_FUNCTIONS, *_METHODS))
        raise ArgumentError(f"{dump.path}: entry: expected one of {names}, got {dump.entry!r}")
    needed = {"call", "init"} if dump.entry.endswith((".plan", ".run")) else {"call"}
    if not needed <= dump.arguments.keys():
        raise ArgumentError(f"{dump.path}: expected a call with its construction, got none")
    is_of_gpu = was_on_gpu(dump)
    gpu = _gpu() if is_of_gpu else None
    with _settings_of(dump):
        outputs, kernels, problem = _run(dump.entry, rebuilt(dump, gpu), gpu)
        expected: list[torch.Tensor] = []
        if gpu is not None and problem is None:
            expected, _, problem = _run(dump.entry, rebuilt(dump, None), None)
    pairs = list(zip(outputs, expected, strict=True)) if expected else []
    return Outcome(
        device="cpu" if gpu is None else _name_of(gpu),
        was_on_gpu=is_of_gpu,
        served_by=kernels or ([CPU_BACKEND] if outputs and gpu is None else []),
        error=problem,
        relative_error=max((relative_error(*pair) for pair in pairs), default=None),
        error_bound=_bound_of(dump),
    )


def document_of(dump: Dump, outcome: Outcome) -> dict[str, Any]:
    """Return the replay as JSON data."""
    error = outcome.relative_error
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
        "served_by": outcome.served_by,
        "error": outcome.error,
        "relative_error": None if error is None else min(error, 1e308),  # JSON has no infinity
        "error_bound": outcome.error_bound,
        "is_right": outcome.is_right,
    }


def summary_of(dump: Dump, outcome: Outcome) -> dict[str, str]:
    """Return the replay as named lines."""
    versions = (f"{name} {value}" for name, value in dump.versions.items() if value)
    unknown = "none: the process ended in this call"
    device = "CPU tensors" if outcome.device == "cpu" else outcome.device
    reason = ", as there is no GPU here" if outcome.lacks_gpu else ""
    return {
        "call": dump.entry + (", captured" if dump.is_captured else ""),
        "dumped with": ", ".join([*versions, *([dump.gpu] if dump.gpu else [])]),
        "dumped result": dump.error or _served(dump.served_by) if dump.has_ended else unknown,
        "replayed on": f"{device}{reason}",
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


def _gpu() -> torch.device | None:
    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", torch.cuda.current_device())


def _name_of(gpu: torch.device) -> str:
    return torch.cuda.get_device_name(gpu)


def _run(
    entry: str, arguments: Mapping[str, dict[str, Any]], gpu: torch.device | None
) -> tuple[list[torch.Tensor], list[str], str | None]:
    """Return the outputs of a call, its kernels, and its error."""
    with record_launches() as launched:
        try:
            result = _call(entry, arguments)
            if gpu is not None and gpu.type == "cuda":
                torch.cuda.synchronize(gpu)  # a fault of a kernel appears here
        except Exception as error:  # noqa: BLE001 - whatever the call raises is what is replayed
            message = str(error).partition("\n")[0]
            return [], list(map(str, launched)), f"{type(error).__name__}: {message}"
    written = arguments["call"].get("output")
    results = result if isinstance(result, tuple) else (result,)
    tensors = [value for value in results if isinstance(value, torch.Tensor)]
    if not tensors and isinstance(written, torch.Tensor):
        tensors = [written]
    return tensors, list(map(str, launched)), None


def _call(entry: str, arguments: Mapping[str, dict[str, Any]]) -> Any:
    call = arguments["call"]
    if entry in _FUNCTIONS:
        return _FUNCTIONS[entry](**call)
    kind, method = _METHODS[entry]
    if method == "__init__":
        _WRAPPERS[kind](**call)
        return None
    wrapper = _WRAPPERS[kind](**arguments["init"])
    if method == "run" and "plan" in arguments:
        wrapper.plan(**arguments["plan"])
    return getattr(wrapper, method)(**call)


def _bound_of(dump: Dump) -> float:
    dtypes = [str(entry.get("dtype")) for name, entry in dump.tensors() if not is_workspace(name)]
    is_8bit = any(dtype.startswith(("float8", "int8", "uint8")) for dtype in dtypes)
    return _FP8_BOUND if is_8bit else _BOUND


@contextmanager
def _settings_of(dump: Dump) -> Iterator[None]:
    """Take the settings of the dumped process that decide how a call runs."""
    before = {name: os.environ.get(name) for name in _KERNEL_SETTINGS}
    try:
        for name in _KERNEL_SETTINGS:
            os.environ.pop(name, None)
            if name in dump.environment:
                os.environ[name] = dump.environment[name]
        current_settings.cache_clear()
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        current_settings.cache_clear()
