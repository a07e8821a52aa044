"""How many SMs a launch may use, where a context has fewer than its GPU.

A cooperative grid must fit the SMs of its context: all of the GPU, those of a green context, or a
share under MPS. The query costs more than a launch, so nothing is queried before the driver has
rejected a grid.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from mlagen.errors import DriverError
from mlagen.runtime.device import device_facts

WHOLE_GPU = 0
NO_COOPERATION = -1  # the driver rejects grids that should fit

_partitioned: set[int] = set()  # GPUs on which a grid was rejected
_rejected: set[tuple[int, int]] = set()  # GPU and SMs, where a grid that should fit was rejected


class TooManyBlocksError(DriverError):
    """A cooperative grid does not fit the SMs of its context; nothing has been launched."""

    def __init__(self, message: str, *, symbol: str, device: int, blocks: int) -> None:
        super().__init__(message, symbol=symbol)
        self.device = device
        self.blocks = blocks


def partition_of(tensor: object) -> int:
    """Return the SMs for which a call on the device of ``tensor`` is planned.

    :data:`WHOLE_GPU` unless the context of its stream is known to have fewer.
    """
    if not _partitioned or not isinstance(tensor, torch.Tensor):
        return WHOLE_GPU
    device = tensor.get_device()
    if device not in _partitioned:
        return WHOLE_GPU
    sms = _current_sms(device)
    return NO_COOPERATION if (device, sms) in _rejected else sms


def note_rejection(error: TooManyBlocksError) -> None:
    """Have later calls planned for the SMs of their context.

    If the rejected grid should fit them, calls in such a context get no cooperative grid.
    """
    sms = _current_sms(error.device)
    if error.blocks <= (sms or device_facts(error.device).sm_count):
        _rejected.add((error.device, sms))
    _partitioned.add(error.device)


def _current_sms(device: int) -> int:
    """Return the SMs of the context of torch's current stream; :data:`WHOLE_GPU` for all."""
    if torch._C._cuda_getDevice() != device:  # noqa: SLF001
        with torch.cuda.device(device):
            return _current_sms(device)
    stream = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001
    sms = _sms_of(stream)
    return sms if 0 < sms < device_facts(device).sm_count else WHOLE_GPU


def _sms_of(stream: int) -> int:
    """Return the SMs of a stream's context, or 0 where the driver does not tell."""
    driver = _driver()
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    try:
        # Of stream 0 it is the current context that counts.
        status, green = driver.cuStreamGetGreenCtx(stream)
        if int(status) == 0 and int(green) != 0:
            status, resource = driver.cuGreenCtxGetDevResource(green, kind)
        else:
            status, context = driver.cuCtxGetCurrent()
            status, resource = driver.cuCtxGetDevResource(context, kind)
    except (AttributeError, RuntimeError):  # older than CUDA 12.5: bindings, or the driver
        return 0
    return int(resource.sm.smCount) if int(status) == 0 else 0


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver
