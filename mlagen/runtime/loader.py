"""Cubin loader: a cubin becomes a kernel that is ready to launch on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mlagen.errors import CaptureError
from mlagen.runtime.capture import is_capturing
from mlagen.runtime.device import checked, lasting_context
from mlagen.runtime.packing import ParameterPacking
from mlagen.runtime.semaphores import reserve_semaphores
from mlagen.spec.kernel import KernelSpec


@dataclass(frozen=True, eq=False)
class LoadedKernel:
    """A kernel on one device, loaded for the life of the process.

    Unloading could break a CUDA graph that holds the kernel.
    """

    spec: KernelSpec
    device: int
    packing: ParameterPacking
    function: Any
    library: Any


def require_no_capture(spec: KernelSpec, device: int) -> None:
    """Raise :class:`CaptureError` while the current stream of ``device`` is capturing."""
    if is_capturing(device):
        raise CaptureError(
            f"{spec}: not loaded, and nothing can be loaded while a CUDA graph is captured; "
            f"make the same call once before the capture, or run "
            f"mlagen.prewarm(archs='native', load=True)"
        )


def load(code: bytes, spec: KernelSpec, device: int) -> LoadedKernel:
    """Load the cubin ``code`` on ``device`` eagerly, not at the first launch."""
    from cuda.bindings import driver

    attributes = driver.CUfunction_attribute
    with torch.cuda.device(device), lasting_context(device):
        library = checked(
            driver.cuLibraryLoadData(code, None, None, 0, None, None, 0), "cuLibraryLoadData"
        )
        kernel = checked(driver.cuLibraryGetKernel(library, spec.symbol.encode()), spec.symbol)
        function = checked(driver.cuKernelGetFunction(kernel), spec.symbol)
        if spec.shared_bytes > 0:
            checked(
                driver.cuFuncSetAttribute(
                    function,
                    attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    spec.shared_bytes,
                ),
                spec.symbol,
            )
        checked(driver.cuFuncLoad(function), spec.symbol)
    if spec.uses_semaphores:
        reserve_semaphores(device)
    return LoadedKernel(spec, device, ParameterPacking(spec), function, library)
