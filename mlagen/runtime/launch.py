"""Kernel launch: packed parameters, and launch configurations with PDL and cooperative grids."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from mlagen.errors import DriverError
from mlagen.runtime.device import bind_context
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.packing import HEAD_BYTES
from mlagen.runtime.partition import TooManyCtasError, exceeds_sms
from mlagen.spec.kernel import KernelSpec

# Errors of a driver that rejects two launch attributes together.
_ATTRIBUTE_ERRORS = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED")
# Error of a cooperative grid that exceeds the co-resident capacity of the context's SMs.
_TOO_MANY_CTAS = "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"

# The kernels that calls launch, for their log and dumps, by thread; empty while none is recorded.
# What enqueues launches reports them: ``if records: report(...)``.
records: dict[int, list[KernelSpec]] = {}


@contextmanager
def record_launches() -> Iterator[list[KernelSpec]]:
    """Yield a list that gets each kernel that this thread launches, once; records may nest."""
    thread = threading.get_ident()
    outer = records.get(thread)
    kernels = records[thread] = []
    try:
        yield kernels
    finally:
        del records[thread]
        if outer is not None:
            records[thread] = outer
            _add(outer, kernels)


def report(specs: Sequence[KernelSpec]) -> None:
    """Add kernels whose launches are enqueued to the record of this thread, if it has one."""
    if (kernels := records.get(threading.get_ident())) is not None:
        _add(kernels, specs)


def _add(kernels: list[KernelSpec], specs: Sequence[KernelSpec]) -> None:
    kernels.extend(spec for spec in dict.fromkeys(specs) if spec not in kernels)


class Launch:
    """A kernel with packed parameters, launchable any number of times from any thread.

    The driver copies the parameters during the call.
    """

    __slots__ = ("_address", "_buffer", "_kernel", "_num_ctas")

    def __init__(
        self, kernel: LoadedKernel, num_ctas: int, values: tuple[float | bytes, ...]
    ) -> None:
        """Pack ``values``, which are those of :func:`launch`."""
        packing = kernel.packing
        self._buffer = packing.new_buffer()
        self._address = ctypes.addressof(self._buffer)
        packing.pack_into(self._buffer, 0, self._address + HEAD_BYTES, *values)
        self._kernel = kernel
        self._num_ctas = num_ctas

    @property
    def kernel(self) -> LoadedKernel:
        """The kernel that it launches."""
        return self._kernel

    def enqueue(self, enable_pdl: bool) -> None:
        """Enqueue the grid on torch's current stream of the kernel's device.

        Raises TooManyCtasError if a persistent grid exceeds the SMs of the context; DriverError if
        the driver rejects the launch for another reason.
        """
        kernel, num_ctas = self._kernel, self._num_ctas
        device = kernel.device
        # The public current_device and current_stream cost more than the launch.
        if torch._C._cuda_getDevice() != device:  # noqa: SLF001
            with torch.cuda.device(device):
                self.enqueue(enable_pdl)
            return
        configurations = _thread_cache.configurations
        configuration = configurations.get((kernel, enable_pdl))
        if configuration is None:
            configuration = configurations[kernel, enable_pdl] = _Configuration(kernel, enable_pdl)
        stream = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001
        if configuration.stream != stream:
            if configuration.checks_sms and exceeds_sms(device, stream, num_ctas):
                raise TooManyCtasError(
                    f"{kernel.spec.symbol}: {num_ctas} CTAs exceed the SMs of the context",
                    symbol=kernel.spec.symbol,
                    device=device,
                    num_ctas=num_ctas,
                )
            configuration.driver_config.hStream = configuration.stream = stream
        if configuration.num_ctas != num_ctas:
            configuration.driver_config.gridDimX = configuration.num_ctas = num_ctas
        (status,) = configuration.launch_kernel(
            configuration.driver_config, kernel.function, self._address, 0
        )
        if status and configuration.rejects_pdl(status):
            configurations[kernel, enable_pdl] = _Configuration(kernel, enable_pdl=False)
            self.enqueue(enable_pdl)
            return
        if status:
            raise _error_of(status, kernel, num_ctas)


def _error_of(status: Any, kernel: LoadedKernel, num_ctas: int) -> DriverError:
    symbol = kernel.spec.symbol
    message = f"{symbol}: launch of {num_ctas} CTAs failed: {status.name}"
    if status.name == _TOO_MANY_CTAS:
        return TooManyCtasError(message, symbol=symbol, device=kernel.device, num_ctas=num_ctas)
    return DriverError(message, symbol=symbol)


def launch(
    kernel: LoadedKernel, num_ctas: int, enable_pdl: bool, values: tuple[float | bytes, ...]
) -> Launch:
    """Enqueue a grid of ``num_ctas`` CTAs on torch's current stream of the kernel's device.

    ``values`` are those of ``kernel.packing.names``. Raises DriverError if the driver rejects the
    launch.
    """
    packed = Launch(kernel, num_ctas, values)
    packed.enqueue(enable_pdl)
    if records:
        report([kernel.spec])
    return packed


class _Configuration:
    """Cached launch configuration of one thread; a launch writes only the fields that change."""

    def __init__(self, kernel: LoadedKernel, enable_pdl: bool) -> None:
        self.driver_config = _configuration(kernel, enable_pdl)
        self.launch_kernel = _launch_kernel()
        # The driver checks a cooperative grid.
        self.checks_sms = kernel.spec.is_persistent and not kernel.spec.is_cooperative
        self.num_ctas = 0
        self.stream = -1

    def rejects_pdl(self, status: Any) -> bool:
        """Whether the driver may accept the launch with the cooperative attribute only."""
        return self.driver_config.numAttrs > 1 and status.name in _ATTRIBUTE_ERRORS


class _ThreadCache(threading.local):
    """Launch configurations of one thread."""

    def __init__(self) -> None:
        self.configurations: dict[tuple[LoadedKernel, bool], _Configuration] = {}


_thread_cache = _ThreadCache()


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
    # CTAs that wait for each other must be co-resident. With PDL, too, they start together, once
    # the SMs have capacity for all of them; see docs/explanation/performance.md.
    if kernel.spec.is_cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    configuration.attrs = attributes
    configuration.numAttrs = len(attributes)
    return configuration
