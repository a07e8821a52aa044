"""SM partitions: the SM count that a launch may use, if its context has fewer than the GPU.

A persistent grid should fit the SMs of its context: all of the GPU, those of a green context, or a
share under MPS. A cooperative one must. The query costs more than a launch, so calls start it only
after a grid was rejected: a cooperative one by the driver, another one by its first launch on the
stream.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from mlagen.errors import DriverError
from mlagen.runtime.device import device_facts

WHOLE_GPU = 0
NO_COOPERATION = -1  # the driver rejects grids that should fit

partitioned_gpus: set[int] = set()  # GPUs on which a grid was rejected
_rejected: set[tuple[int, int]] = set()  # GPU and SMs, where a grid that should fit was rejected
_whole_streams: set[tuple[int, int]] = set()  # GPU and stream, whose context has all SMs
_SPECIAL_STREAMS = 3  # handles below are streams of the current context


class TooManyCtasError(DriverError):
    """A persistent grid exceeds the SMs of its context; nothing has been launched."""

    def __init__(self, message: str, *, symbol: str, device: int, num_ctas: int) -> None:
        super().__init__(message, symbol=symbol)
        self.device = device
        self.num_ctas = num_ctas


def partition_of(tensor: object) -> int:
    """Return the SM count to plan for on the device of ``tensor``.

    :data:`WHOLE_GPU` unless the context of the current stream is known to have fewer.
    """
    if not partitioned_gpus or not isinstance(tensor, torch.Tensor):
        return WHOLE_GPU
    device = tensor.get_device()
    if device not in partitioned_gpus:
        return WHOLE_GPU
    sms = _current_sms(device)
    return NO_COOPERATION if (device, sms) in _rejected else sms


def record_rejection(error: TooManyCtasError) -> None:
    """Plan later calls for the SMs of their context.

    If the rejected grid should have fit, calls in such a context use no cooperative grid.
    """
    sms = _current_sms(error.device)
    if error.num_ctas <= (sms or device_facts(error.device).sm_count):
        _rejected.add((error.device, sms))
    partitioned_gpus.add(error.device)


def exceeds_sms(device: int, stream: int, num_ctas: int) -> bool:
    """Whether a grid that the driver would accept exceeds the SMs of a stream's context.

    False once calls on the GPU are planned for the SMs of their context: then it is no larger than
    the workspace requires.
    """
    if device in partitioned_gpus or (device, stream) in _whole_streams:
        return False
    sms = _sms_of(stream)
    if 0 < sms < device_facts(device).sm_count:
        return num_ctas > sms
    if stream >= _SPECIAL_STREAMS:
        _whole_streams.add((device, stream))
    return False


def _current_sms(device: int) -> int:
    """Return the SM count of the current stream's context; :data:`WHOLE_GPU` for all."""
    if torch._C._cuda_getDevice() != device:  # noqa: SLF001
        with torch.cuda.device(device):
            return _current_sms(device)
    stream = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001
    sms = _sms_of(stream)
    return sms if 0 < sms < device_facts(device).sm_count else WHOLE_GPU


def _sms_of(stream: int) -> int:
    """Return the SM count of a stream's context, or 0 if the driver does not report it."""
    driver = _driver()
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    try:
        # Stream 0 refers to the current context.
        status, green = driver.cuStreamGetGreenCtx(stream)
        if int(status) == 0 and int(green) != 0:
            status, resource = driver.cuGreenCtxGetDevResource(green, kind)
        else:
            status, context = driver.cuCtxGetCurrent()
            status, resource = driver.cuCtxGetDevResource(context, kind)
    except (AttributeError, RuntimeError):  # bindings or a driver older than CUDA 12.5
        return 0
    return int(resource.sm.smCount) if int(status) == 0 else 0


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver
