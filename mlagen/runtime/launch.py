"""A loaded kernel and its parameters to a stream."""

from __future__ import annotations

import ctypes
import struct
import threading
from functools import cache
from typing import Any

import torch

from mlagen.errors import DriverError
from mlagen.runtime.device import bind_context
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.partition import TooManyBlocksError

# Before the parameters of a launch lies where they begin: the array of pointers to each argument of
# the kernel, which has one. Eight bytes more leave them as aligned as what ctypes allocates.
_HEAD = struct.Struct("<Q8x")


# How a driver may say that it does not take two attributes together.
_REJECTIONS = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED")
# And that the context has too few SMs for blocks that must all be there.
_TOO_MANY_BLOCKS = "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"


class Launch:
    """A kernel and what is passed to it, to be launched any number of times by any thread.

    The driver copies the parameters while it is called.
    """

    __slots__ = ("_address", "_blocks", "_buffer", "_kernel")

    def __init__(
        self, kernel: LoadedKernel, blocks: int, values: tuple[float | bytes, ...]
    ) -> None:
        """Pack ``values``; they are as those of :func:`launch`."""
        allocate, packing = _memory_for(kernel.packing)
        self._buffer = allocate()
        self._address = ctypes.addressof(self._buffer)
        packing.pack_into(self._buffer, 0, self._address + _HEAD.size, *values)
        self._kernel = kernel
        self._blocks = blocks

    def enqueue(self, enable_pdl: bool) -> None:
        """Enqueue the blocks on torch's current stream of the kernel's device.

        Raises
        ------
        TooManyBlocksError
            If the SMs of the context are too few for a cooperative grid.
        DriverError
            If the driver rejects the launch for another reason.
        """
        kernel, blocks = self._kernel, self._blocks
        device = kernel.device
        # The public current_device and current_stream cost more than the launch.
        if torch._C._cuda_getDevice() != device:  # noqa: SLF001
            with torch.cuda.device(device):
                self.enqueue(enable_pdl)
            return
        configurations = _threads.configurations
        configuration = configurations.get((kernel, enable_pdl))
        if configuration is None:
            configuration = configurations[kernel, enable_pdl] = _Configuration(kernel, enable_pdl)
        stream = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001
        if configuration.stream != stream:
            configuration.of_driver.hStream = configuration.stream = stream
        if configuration.blocks != blocks:
            configuration.of_driver.gridDimX = configuration.blocks = blocks
        (status,) = configuration.launch_kernel(
            configuration.of_driver, kernel.function, self._address, 0
        )
        if status and configuration.has_one_too_many(status):
            configurations[kernel, enable_pdl] = _Configuration(kernel, enable_pdl=False)
            self.enqueue(enable_pdl)
            return
        if status:
            raise _error_of(status, kernel, blocks)


def _error_of(status: Any, kernel: LoadedKernel, blocks: int) -> DriverError:
    symbol = kernel.spec.symbol
    message = f"{symbol}: launch of {blocks} blocks failed: {status.name}"
    if status.name == _TOO_MANY_BLOCKS:
        return TooManyBlocksError(message, symbol=symbol, device=kernel.device, blocks=blocks)
    return DriverError(message, symbol=symbol)


def launch(kernel: LoadedKernel, blocks: int, enable_pdl: bool, *values: float | bytes) -> Launch:
    """Enqueue ``blocks`` blocks on torch's current stream of the kernel's device.

    ``values`` are the fields of ``kernel.spec.parameters``, in order, with all tensor maps joined
    to one value and all integers to another; see :func:`mlagen.spec.kernel.packing_of`.

    Raises
    ------
    DriverError
        If the driver rejects the launch.
    """
    made = Launch(kernel, blocks, values)
    made.enqueue(enable_pdl)
    return made


class _Configuration:
    """A launch configuration of one thread, whose fields are written where they change."""

    def __init__(self, kernel: LoadedKernel, enable_pdl: bool) -> None:
        self.of_driver = _configuration(kernel, enable_pdl)
        self.launch_kernel = _launch_kernel()
        self.blocks = 0
        self.stream = -1

    def has_one_too_many(self, status: Any) -> bool:
        """Whether a driver that rejects so may take a launch that is cooperative only."""
        return self.of_driver.numAttrs > 1 and status.name in _REJECTIONS


class _Threads(threading.local):
    """What one thread reuses: its launch configurations."""

    def __init__(self) -> None:
        self.configurations: dict[tuple[LoadedKernel, bool], _Configuration] = {}


_threads = _Threads()


@cache
def _memory_for(packing: struct.Struct) -> tuple[Any, struct.Struct]:
    """Return what allocates the head and the parameters of a launch, and what packs both."""
    whole = struct.Struct(_HEAD.format + packing.format.removeprefix("<"))
    return ctypes.c_char * whole.size, whole


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
    if enable_pdl and kernel.spec.arch.has_griddepcontrol:
        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    # Blocks that wait for each other must all be there. They begin together in a dependent launch,
    # too: when there is room for all, as docs/measurements.md tells.
    if kernel.spec.is_cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    configuration.attrs = attributes
    configuration.numAttrs = len(attributes)
    return configuration
