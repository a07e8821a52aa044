"""Argument checks; each message names argument, rule and value."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from mlagen.errors import UnsupportedError
from mlagen.families.common.memory import require_memory, require_shaped, require_writable
from mlagen.settings import current_settings
from mlagen.spec.dtype import DType
from mlagen.values import (
    INT32_MAX,
    is_scalar,
    reject,
    reject_dtype,
    require,
    require_choice,
    require_flag,
    require_float32,
    require_number,
    require_whole_number,
    shown,
)

# Checks of plain values are imported from here too.
__all__ = [
    "INT32_MAX",
    "reject",
    "reject_dtype",
    "require",
    "require_choice",
    "require_flag",
    "require_float32",
    "require_number",
    "require_whole_number",
    "shown",
]

_SCALE = "a float or a torch.float32 tensor of one element"

DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.FP16}
FLOAT_DTYPES = {**DTYPES, torch.float8_e4m3fn: DType.E4M3}

_MAX_SINKS = 1 << 16  # above the heads of any call; larger tensors are rejected, not converted

# The kernels read token counts and page ids as int32; unsigned values stay below 2^31 too.
INDEX_DTYPES = (torch.int32, torch.uint32)

# Bytes of one cp.async or vector store, which need an address aligned to them.
ALIGNMENT_BYTES = 16


def reject_unserved(keyword: str, value: object, nothing: object) -> None:
    """Reject a keyword that no kernel implements, unless it asks for nothing."""
    if value is not nothing and not (is_scalar(value) and value == nothing):
        rule = f"not implemented, expected {nothing!r}"
        raise UnsupportedError(f"{keyword}: {rule}, got {shown(value)}")


def require_served(
    value: object, argument: str, served: Collection[str], unserved: Collection[str]
) -> str:
    """Return a word of ``served``; those of ``unserved`` are valid in FlashInfer alone."""
    if isinstance(value, str) and value in unserved:
        rule = f"not implemented, expected {' or '.join(served)}"
        raise UnsupportedError(f"{argument}: {rule}, got {value}")
    return require_choice(value, argument, served)


def require_tensor(value: object, argument: str) -> torch.Tensor:
    """Return ``value`` if it is a tensor."""
    if not isinstance(value, torch.Tensor):
        reject(argument, "a torch.Tensor", type(value).__name__)
    return value


def require_device(tensor: torch.Tensor, argument: str, device: torch.device) -> None:
    """Reject a tensor on another device than that of the first tensor of a call."""
    rule = f"{device} (of the first tensor)"
    require(tensor.device == device, f"{argument}.device", rule, tensor.device)


def require_dtype(
    tensor: torch.Tensor, argument: str, allowed: Sequence[torch.dtype], why: str = ""
) -> None:
    """Reject a tensor whose dtype is not among ``allowed``."""
    if tensor.dtype not in allowed:
        rule = " or ".join(map(str, allowed))
        rejection = reject_dtype if any(each.is_floating_point for each in allowed) else reject
        rejection(f"{argument}.dtype", f"{rule} ({why})" if why else rule, tensor.dtype)


def require_shape(
    tensor: torch.Tensor, argument: str, allowed: Sequence[tuple[int, ...]], why: str = ""
) -> None:
    """Reject a tensor whose shape is not among ``allowed``."""
    require_shaped(tensor, argument)
    if tuple(tensor.shape) not in allowed:
        rule = " or ".join(str(list(shape)) for shape in dict.fromkeys(allowed))
        reject(f"{argument}.shape", f"{rule} ({why})" if why else rule, list(tensor.shape))


def require_dims(tensor: torch.Tensor, argument: str, allowed: Sequence[int]) -> None:
    """Reject a tensor with another number of dimensions."""
    require_shaped(tensor, argument)
    if tensor.dim() not in allowed:
        reject(f"{argument}.ndim", " or ".join(map(str, allowed)), tensor.dim())


def require_contiguous(tensor: torch.Tensor, argument: str) -> None:
    """Reject a tensor with gaps or reordered dimensions."""
    if not tensor.is_contiguous():
        rule = f"no gaps in shape {list(tensor.shape)}"
        reject(f"{argument} must be contiguous", rule, f"strides {tensor.stride()}")


def require_dense_last_dim(tensor: torch.Tensor, argument: str) -> None:
    """Reject a tensor whose last dimension has gaps."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        reject(f"{argument}.stride(-1)", 1, tensor.stride(-1))


def require_aligned(tensor: torch.Tensor, argument: str, alignment: int = ALIGNMENT_BYTES) -> None:
    """Reject a tensor with a stride that breaks the alignment of its rows, in bytes."""
    elements = alignment // tensor.element_size()
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if dim != tensor.dim() - 1 and size > 1 and stride % elements:
            reject(f"{argument}.stride({dim})", f"a multiple of {elements}", stride)


def require_aligned_pointer(
    tensor: torch.Tensor, argument: str, alignment: int = ALIGNMENT_BYTES
) -> None:
    """Reject a tensor whose base address breaks the alignment, in bytes."""
    if excess := tensor.data_ptr() % alignment:
        reject(f"{argument}.data_ptr()", f"a multiple of {alignment}", f"{excess} more than one")


def require_strides(tensor: torch.Tensor, argument: str, other: torch.Tensor, of: str) -> None:
    """Reject strides that differ from those of ``other``, which has the same shape.

    Strides of axes of size 1 do not count.
    """
    pairs = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    if any(size > 1 and stride != expected for size, stride, expected in pairs):
        reject(f"{argument}.stride()", f"{other.stride()} (of {of})", tensor.stride())


def token_stride(tensor: torch.Tensor, q_len: int) -> int:
    """Return the stride between query tokens of ``[batch, q_len, ...]``, in elements."""
    return tensor.stride(0 if q_len == 1 else 1)


def check_token_stride(tensor: torch.Tensor, argument: str) -> None:
    """Reject ``[batch, q_len, ...]`` whose query tokens have no uniform stride."""
    batch, q_len = tensor.shape[:2]
    if batch > 1 and q_len > 1:
        expected = q_len * tensor.stride(1)
        require(
            tensor.stride(0) == expected,
            f"{argument}.stride(0)",
            f"{expected} (q_len * stride of a query token)",
            tensor.stride(0),
        )


def require_index(tensor: torch.Tensor, argument: str, device: torch.device) -> None:
    """Reject a tensor that does not hold 32-bit integers on ``device``."""
    require_device(tensor, argument, device)
    require_dtype(tensor, argument, INDEX_DTYPES)


def require_ints(
    value: object,
    argument: str,
    device: torch.device,
    allowed: Sequence[tuple[int, ...]],
    why: str = "",
    dtypes: Sequence[torch.dtype] = INDEX_DTYPES,
) -> torch.Tensor:
    """Return ``value`` if it is a contiguous int32 tensor on ``device`` with an allowed shape."""
    tensor = require_tensor(value, argument)
    require_device(tensor, argument, device)
    require_dtype(tensor, argument, dtypes)
    require_shape(tensor, argument, allowed, why)
    require_contiguous(tensor, argument)
    return tensor


def require_floats(
    value: object,
    argument: str,
    device: torch.device,
    allowed: Sequence[tuple[int, ...]],
    why: str = "",
) -> torch.Tensor:
    """Return ``value`` if it is a contiguous fp32 tensor on ``device`` with an allowed shape."""
    return require_ints(value, argument, device, allowed, why, (torch.float32,))


def dense_target(
    output: torch.Tensor | None,
    argument: str,
    query: torch.Tensor,
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, ...]],
    of: str = "",
) -> torch.Tensor | None:
    """Return an output that kernels can write; None for one with gaps, which gets a copy.

    Its dtype and shape are those of the argument ``of``, if it is one.
    """
    if output is None:
        return None
    require_memory(require_tensor(output, argument), argument)
    require_writable(output, argument)
    require_device(output, argument, query.device)
    require_dtype(output, argument, (dtype,), of and f"dtype of {of}")
    require_shape(output, argument, shapes, of and f"shape of {of}")
    require_dense_last_dim(output, argument)
    return output if output.is_contiguous() else None


def require_workspace(value: object, argument: str, device: torch.device) -> None:
    """Reject anything but a contiguous tensor on ``device``; the plan checks its size."""
    workspace = require_tensor(value, argument)
    require_device(workspace, argument, device)
    require_contiguous(workspace, argument)


def require_scale(scale: object, argument: str, device: torch.device) -> None:
    """Reject a scale that is neither a float32 number nor one fp32 element on ``device``.

    Infinities and NaNs are valid and propagate by IEEE arithmetic.
    """
    if isinstance(scale, torch.Tensor):
        require_device(scale, argument, device)
        require_dtype(scale, argument, (torch.float32,))
        require_shaped(scale, argument)
        require(scale.numel() == 1, f"{argument}.numel()", 1, scale.numel())
    else:
        require_float32(scale, argument, _SCALE)


def canonical_scale(scale: object, argument: str) -> float | torch.Tensor:
    """Return a scale as a float, or unchanged if it is a tensor."""
    if type(scale) is float or isinstance(scale, torch.Tensor):
        return scale
    return require_float32(scale, argument, _SCALE)


def canonical_sinks(sinks: torch.Tensor | None) -> torch.Tensor | None:
    """Return sinks as fp32, of which 16-bit ones launch one small kernel; no tensor unchanged."""
    if not isinstance(sinks, torch.Tensor):
        return sinks
    require_dtype(sinks, "sinks", (torch.float32, *DTYPES))
    if sinks.dtype is torch.float32:
        return sinks
    require_memory(sinks, "sinks")
    require(sinks.numel() <= _MAX_SINKS, "sinks.shape", "one for each head", list(sinks.shape))
    return sinks.float()


def unwrap_sinks(sinks: Any) -> Any:
    """Return the tensor in a list of one, in fp32; no tensor unchanged."""
    if isinstance(sinks, list):
        if len(sinks) != 1:
            reject("sinks", "a list of one tensor", f"{len(sinks)}")
        (sinks,) = sinks
    return canonical_sinks(sinks)


def is_pdl_enabled(enable_pdl: object) -> bool:
    """Return whether a launch uses programmatic dependent launch (PDL); None means yes."""
    return enable_pdl is None or require_flag(enable_pdl, "enable_pdl")


def chooses_batch_invariant(value: object) -> bool:
    """Return whether a call is batch-invariant; None means what the settings say."""
    if value is None:
        return current_settings().batch_invariant
    return require_flag(value, "batch_invariant")


def factor_of(value: object, argument: str) -> float:
    """Return a factor of keys or values that fits in fp32; None means 1."""
    return 1.0 if value is None else require_float32(value, argument)


def check_counter_buffer(buffer: object, query: object) -> None:
    """Reject a buffer of FlashInfer's kernels, unless it is on the device of the query."""
    if buffer is not None:
        name = "multi_ctas_kv_counter_buffer"
        tensor = require_tensor(buffer, name)
        if isinstance(query, torch.Tensor):
            require_device(tensor, name, query.device)
