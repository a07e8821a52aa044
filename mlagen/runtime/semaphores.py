"""Device semaphores for cross-CTA reductions, and the cached scheduler metadata behind them.

Semaphores are zero before and after each launch. The sm90 MLA kernels reuse the scheduler metadata
of the previous launch in the same region if the schedule id and the lengths are the same.

A workspace needs no initialization, so the semaphores are separate memory. Each workspace has its
own, since calls with different workspaces may run concurrently. It has up to four regions, by
schedule id, so that kinds of layers that alternate find their metadata. They live as long as the
process, because CUDA graphs hold their addresses.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from mlagen.errors import CaptureError
from mlagen.runtime.capture import is_capturing
from mlagen.runtime.device import device_facts
from mlagen.spec.mla.sm90 import semaphore_region_bytes

# Regions of semaphores per slab; a slab is less than 5 MiB.
_REGIONS = 128

# Regions of a workspace, by schedule id. DeepSeek-V4 has three kinds of layers, and what a model
# calls first one after the other has ids in a row.
_SCHEDULES = 4
_ALIGNMENT_BYTES = 128

_regions: dict[tuple[int, int, int], int] = {}  # addresses by device, workspace and schedule
_free: dict[int, list[int]] = {}  # addresses by device
_slabs: list[torch.Tensor] = []
_schedule_ids = itertools.count(1)
_lock = threading.Lock()


def semaphores_of(device: int, workspace: int, schedule_id: int) -> int:
    """Return the address of a workspace's semaphores, one per SM, and scheduler metadata."""
    key = device, workspace, schedule_id % _SCHEDULES
    return _regions.get(key) or _take_region(key)


def new_schedule_id() -> int:
    """Return a schedule id that is unique within the process, and not zero."""
    return next(_schedule_ids)


def reserve_semaphores(device: int, workspaces: int = 1) -> None:
    """Allocate semaphores for so many new workspaces, for use during CUDA graph capture."""
    with _lock:
        free = _free.setdefault(device, [])
        while len(free) < workspaces * _SCHEDULES:
            free[:0] = _new_regions(device)


def _take_region(key: tuple[int, int, int]) -> int:
    with _lock:
        if key not in _regions:
            _regions[key] = _free_region(*key[:2])
        return _regions[key]


def _free_region(device: int, workspace: int) -> int:
    """Return a free region; while a graph is captured, if none is left, one of the workspace's."""
    free = _free.setdefault(device, [])
    if not free and is_capturing(device):
        for schedule in range(_SCHEDULES):
            if found := _regions.get((device, workspace, schedule)):
                return found
        raise CaptureError(
            "workspace_buffer: expected one with semaphores, got one without while a CUDA graph "
            "is captured and no free ones are left; make a call with this workspace once before "
            "the capture"
        )
    if not free:
        free.extend(_new_regions(device))
    return free.pop()


def _new_regions(device: int) -> list[int]:
    """Return the addresses of a new slab's regions, zeroed and visible to every stream."""
    size = semaphore_region_bytes(device_facts(device).sm_count)
    step = -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    slab = _zeros(_REGIONS * step, device)
    _slabs.append(slab)
    return [slab.data_ptr() + index * step for index in reversed(range(_REGIONS))]


def _zeros(size: int, device: int) -> torch.Tensor:
    # In a thread of its own: torch's CUDA graph pools capture allocations of the calling thread.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_zeros_here, size, device).result()


def _zeros_here(size: int, device: int) -> torch.Tensor:
    with torch.cuda.device(device):
        zeros = torch.zeros(size, dtype=torch.uint8, device="cuda")
        torch.cuda.current_stream().synchronize()
    return zeros
