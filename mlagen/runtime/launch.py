"""A loaded kernel and its parameters to a stream."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import torch

from mlagen.errors import DriverError
from mlagen.runtime.device import bind_context
from mlagen.runtime.loader import LoadedKernel

# CUDA passes at most this many bytes of parameters to a kernel.
_PARAMETER_BYTES = 4096


class _Launcher(threading.local):
    """What one thread reuses at every launch: a parameter buffer and launch configurations."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_PARAMETER_BYTES)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.address = ctypes.addressof(self.pointers)
        self.configurations: dict[tuple[LoadedKernel, bool], Any] = {}


_launcher = _Launcher()


def launch(kernel: LoadedKernel, blocks: int, enable_pdl: bool, *values: float | bytes) -> None:
    """Enqueue ``blocks`` blocks on torch's current stream of the kernel's device.

    ``values`` are the fields of ``kernel.spec.parameters``, in order, with all tensor maps joined
    to one value and all integers to another; see :func:`mlagen.spec.kernel.packing_of`.

    Raises
    ------
    DriverError
        If the driver refuses the launch.
    """
    # The public current_device and current_stream cost more than the launch.
    if torch._C._cuda_getDevice() != kernel.device:  # noqa: SLF001
        with torch.cuda.device(kernel.device):
            launch(kernel, blocks, enable_pdl, *values)
        return
    local = _launcher
    configuration = local.configurations.get((kernel, enable_pdl))
    if configuration is None:
        configuration = _configuration(kernel, enable_pdl)
        local.configurations[kernel, enable_pdl] = configuration
    kernel.packing.pack_into(local.buffer, 0, *values)
    configuration.gridDimX = blocks
    configuration.hStream = torch._C._cuda_getCurrentRawStream(kernel.device)  # noqa: SLF001
    (status,) = _launch_kernel()(configuration, kernel.function, local.address, 0)
    if status:
        symbol = kernel.spec.symbol
        message = f"{symbol}: launch of {blocks} blocks failed: {status.name}"
        raise DriverError(message, symbol=symbol)


@cache
def _launch_kernel() -> Any:
    from cuda.bindings import driver

    return driver.cuLaunchKernelEx


def _configuration(kernel: LoadedKernel, enable_pdl: bool) -> Any:
    from cuda.bindings import driver

    bind_context(kernel.device)
    configuration = driver.CUlaunchConfig()
    configuration.gridDimX = configuration.gridDimY = configuration.gridDimZ = 1
    configuration.blockDimX = kernel.spec.threads
    configuration.blockDimY = configuration.blockDimZ = 1
    configuration.sharedMemBytes = kernel.spec.shared_bytes
    attributes = []
    # Blocks that wait for each other must all be there. A dependent launch lets some begin while
    # those of the kernel before still run, and two of them on two streams could starve each other.
    if enable_pdl and kernel.spec.arch.has_griddepcontrol and not kernel.spec.is_cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if kernel.spec.is_cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    configuration.attrs = attributes
    configuration.numAttrs = len(attributes)
    return configuration
