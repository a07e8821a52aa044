"""CUDA graph capture state of the current stream."""

from __future__ import annotations

import torch


def is_capturing(device: torch.device | int) -> bool:
    """Return whether the current stream of ``device`` is capturing; False for a CPU."""
    if isinstance(device, torch.device):
        if device.type != "cuda":
            return False
        device = device.index
    # The public functions and a device switch cost more than the query.
    if torch._C._cuda_getDevice() == device:  # noqa: SLF001
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):  # every device has a current stream
        return torch.cuda.is_current_stream_capturing()
