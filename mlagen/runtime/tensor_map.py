"""TMA descriptors (``CUtensorMap``): 128 opaque bytes that the driver encodes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

from mlagen.runtime.device import checked
from mlagen.spec.dtype import DType

MAP_BYTES = 128


@dataclass(frozen=True, kw_only=True)
class TiledTensor:
    """A tensor copied in TMA boxes, without its base address; the innermost axis comes first."""

    dtype: DType
    sizes: tuple[int, ...]  # elements, or bytes of several
    strides: tuple[int, ...]  # bytes, of all axes but the first, which is contiguous
    box: tuple[int, ...]  # elements
    has_words: bool = False  # elements are 4 bytes of several, and boxes are not swizzled

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return 4 if self.has_words else self.dtype.unit_bytes


def encode(tensor: TiledTensor, address: int) -> bytes:
    """Return the TMA descriptor of a tensor at ``address``.

    Box rows are 128, 64 or 32 bytes and swizzled in shared memory, unless of words. Strides must be
    multiples of 16 bytes below 2^40, or the driver rejects the tensor.
    """
    from cuda.bindings import driver

    mode = "NONE" if tensor.has_words else f"{tensor.box[0] * tensor.element_bytes}B"
    swizzle = f"CU_TENSOR_MAP_SWIZZLE_{mode}"
    result = driver.cuTensorMapEncodeTiled(
        _element_type(tensor),
        len(tensor.sizes),
        address,
        [driver.cuuint64_t(size) for size in tensor.sizes],
        [driver.cuuint64_t(stride) for stride in tensor.strides],
        [driver.cuuint32_t(size) for size in tensor.box],
        [driver.cuuint32_t(1)] * len(tensor.sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, swizzle),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    encoded = checked(result, "cuTensorMapEncodeTiled")
    return ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)


def _element_type(tensor: TiledTensor) -> Any:
    from cuda.bindings import driver

    if tensor.has_words:
        return driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT32
    return _element_types()[tensor.dtype.element]


@cache
def _element_types() -> dict[DType, Any]:
    from cuda.bindings import driver

    return {
        DType.BF16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        DType.FP16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        **dict.fromkeys(
            (DType.E4M3, DType.E5M2, DType.INT8, DType.NVFP4),
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        ),
    }
