"""Run of a rebuilt call, compared with the CPU backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mlagen import decode, mla, xqa
from mlagen.errors import ArgumentError
from mlagen.gqa.batch_op import batch_decode_run
from mlagen.mla import batch_op
from mlagen.observe.document import SCRATCH
from mlagen.observe.observed import CPU_BACKEND
from mlagen.runtime.launch_record import record_launches
from mlagen.settings import current_settings

from .contents import fill
from .document import Dump, tensors_in
from .outcome import Outcome
from .rebuild import Rebuilt, require_memory

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        mla.trtllm_batch_decode_with_kv_cache_mla,
        mla.xqa_batch_decode_with_kv_cache_mla,
        mla.flare_mla_decoding,
        decode.xqa_batch_decode_with_kv_cache,
        decode.trtllm_batch_decode_with_kv_cache,
        xqa.xqa,
        xqa.xqa_mla,
        batch_op.batch_mla_run,
        batch_op.batch_mla_run_planless,
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
_KERNEL_SETTINGS = ("MLAGEN_MLA_KERNEL", "MLAGEN_MLA_P_DTYPE", "MLAGEN_GQA_KERNEL", "MLAGEN_CHECK")

# Rounding of P and O to 16 bits, or of P to e4m3. `mlagen bench` allows more in 16 bits, for
# libraries that round partial outputs as well.
_BOUND, _FP8_BOUND = 4e-3, 5e-2


def replay(dump: Dump, seed: int) -> Outcome:
    """Run the call of a dump, on the GPU if it was on one and there is one.

    Raises
    ------
    ArgumentError
        If the dump cannot be rebuilt on this machine.
    """
    if dump.entry not in {*_FUNCTIONS, *_METHODS}:
        names = ", ".join((*_FUNCTIONS, *_METHODS))
        raise ArgumentError(f"{dump.path}: entry: expected one of {names}, got {dump.entry!r}")
    if "call" not in dump.parts or (dump.entry in _METHODS and not _has_setup(dump)):
        raise ArgumentError(f"{dump.path}: expected a call with its construction, got none")
    was_on_gpu = any(
        str(entry.get("device")).startswith("cuda")
        for part in dump.parts.values()
        for entry in tensors_in(part.arguments)
    )
    cpu = torch.device("cpu")
    gpu = _gpu() if was_on_gpu else None
    device = gpu or cpu
    require_memory(dump.parts, device)
    try:
        rebuilt = {name: Rebuilt(part, device) for name, part in dump.parts.items()}
        fill(dump, rebuilt, seed)
        copies = {name: Rebuilt(dump.parts[name], cpu, of) for name, of in rebuilt.items()}
    except (RuntimeError, TypeError) as error:  # torch rejects a size or a layout
        reason = str(error).partition("\n")[0]
        raise ArgumentError(f"{dump.path}: expected a valid call, got {reason}") from error
    with _settings_of(dump):
        outputs, kernels, problem = _run(dump.entry, rebuilt, device)
        expected: list[torch.Tensor] = []
        if gpu is not None and problem is None:
            expected, _, problem = _run(dump.entry, copies, cpu)
    pairs = list(zip(outputs, expected, strict=True)) if expected else []
    return Outcome(
        device="cpu" if gpu is None else _name_of(gpu),
        was_on_gpu=was_on_gpu,
        served_by=kernels or ([CPU_BACKEND] if outputs and gpu is None else []),
        error=problem,
        relative_error=max((relative_error(*pair) for pair in pairs), default=None),
        error_bound=_bound_of(dump),
    )


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of ``expected``.

    Infinite if they are not finite in the same elements.
    """
    out, expected = out.detach().cpu().double(), expected.detach().cpu().double()
    is_finite = expected.isfinite()
    is_same = (out == expected) | (out.isnan() & expected.isnan())
    if not bool((is_same | (is_finite & out.isfinite())).all()):
        return float("inf")
    difference = (out - expected)[is_finite].norm()
    norm = expected[is_finite].norm()
    return float(difference / norm) if norm else float(difference)


def _gpu() -> torch.device | None:
    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", torch.cuda.current_device())


def _name_of(gpu: torch.device) -> str:
    return torch.cuda.get_device_name(gpu)


def _has_setup(dump: Dump) -> bool:
    return dump.entry.endswith("__init__") or "init" in dump.parts


def _run(
    entry: str, rebuilt: Mapping[str, Rebuilt], device: torch.device
) -> tuple[list[torch.Tensor], list[str], str | None]:
    """Return the outputs of a call, its kernels, and its error."""
    with record_launches() as launched:
        try:
            result = _call(entry, rebuilt)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a fault of a kernel appears here
        except Exception as error:  # noqa: BLE001 - whatever the call raises is what is replayed
            message = str(error).partition("\n")[0]
            return [], list(map(str, launched)), f"{type(error).__name__}: {message}"
    written = rebuilt["call"].arguments.get("output")
    results = result if isinstance(result, tuple) else (result,)
    tensors = [value for value in results if isinstance(value, torch.Tensor)]
    if not tensors and isinstance(written, torch.Tensor):
        tensors = [written]
    return tensors, list(map(str, launched)), None


def _call(entry: str, rebuilt: Mapping[str, Rebuilt]) -> Any:
    arguments = rebuilt["call"].arguments
    if entry in _FUNCTIONS:
        return _FUNCTIONS[entry](**arguments)
    kind, method = _METHODS[entry]
    if method == "__init__":
        _WRAPPERS[kind](**arguments)
        return None
    wrapper = _WRAPPERS[kind](**rebuilt["init"].arguments)
    if method == "run" and "plan" in rebuilt:
        wrapper.plan(**rebuilt["plan"].arguments)
    return getattr(wrapper, method)(**arguments)


def _bound_of(dump: Dump) -> float:
    call = dump.parts["call"].arguments.items()
    dtypes = {
        entry["dtype"]
        for name, argument in call
        if name not in SCRATCH or name in {"out", "output"}
        for entry in tensors_in(argument)
    }
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
