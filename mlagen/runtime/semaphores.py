"""Where blocks of a launch count each other's arrivals, and keep what they begin with.

Counters are zeros before a launch, and zeros again after. Behind them, blocks of a Hopper MLA
kernel find what they began with when the launch before had the same plan and the same lengths.

The workspace of a call needs no initial value, so the counters are elsewhere. Each workspace has
some of its own, as calls with different ones may run at once; they are kept while the process
lives, for CUDA graphs hold their addresses.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from mlagen.errors import CaptureError
from mlagen.runtime.capture import is_capturing
from mlagen.runtime.device import device_facts
from mlagen.spec.mla_sm90 import bytes_beside_workspace

# Workspaces that a slab has counters for; all of it is less than 3 MiB.
_REGIONS = 128
_ALIGNMENT_BYTES = 128

_regions: dict[tuple[int, int], int] = {}  # addresses by device and workspace
_free: dict[int, list[int]] = {}  # addresses by device
_slabs: list[torch.Tensor] = []
_plans = itertools.count(1)
_lock = threading.Lock()


def semaphores_of(device: int, workspace: int) -> int:
    """Return the address of the counters that belong to a workspace: for each SM, and what is kept.

    Raises
    ------
    CaptureError
        If there are none left and a CUDA graph is being captured.
    """
    return _regions.get((device, workspace)) or _take_region(device, workspace)


def new_schedule_id() -> int:
    """Return a number that no plan of this process has had; zero is none's."""
    return next(_plans)


def reserve_semaphores(device: int, least: int = 1) -> None:
    """Have counters for ``least`` workspaces ready, so that a call in a CUDA graph finds some."""
    with _lock:
        known = _free.get(device, [])
        if len(known) < least:
            _free[device] = [*_new_regions(device), *known]


def _take_region(device: int, workspace: int) -> int:
    with _lock:
        if (device, workspace) not in _regions:
            if not _free.get(device):
                _require_no_capture(device)
                _free[device] = _new_regions(device)
            _regions[device, workspace] = _free[device].pop()
        return _regions[device, workspace]


def _require_no_capture(device: int) -> None:
    if is_capturing(device):
        raise CaptureError(
            f"workspace_buffer: one of the {_REGIONS} that counters are kept ready for, got "
            f"one more while a CUDA graph is captured; make a call with this workspace once "
            f"before the capture"
        )


def _new_regions(device: int) -> list[int]:
    """Return addresses of zeros that are there for every stream."""
    size = bytes_beside_workspace(device_facts(device).sm_count)
    step = -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    slab = _zeros(_REGIONS * step, device)
    _slabs.append(slab)
    return [slab.data_ptr() + index * step for index in reversed(range(_REGIONS))]


def _zeros(size: int, device: int) -> torch.Tensor:
    # In a thread of its own: torch's pools for CUDA graphs take what the calling thread allocates.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_zeros_here, size, device).result()


def _zeros_here(size: int, device: int) -> torch.Tensor:
    with torch.cuda.device(device):
        zeros = torch.zeros(size, dtype=torch.uint8, device="cuda")
        torch.cuda.current_stream().synchronize()
    return zeros
