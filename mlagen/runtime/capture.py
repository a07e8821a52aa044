"""Whether a CUDA graph is being captured."""

from __future__ import annotations

import torch


def is_capturing(device: torch.device | int) -> bool:
    """Return whether the current stream of ``device`` is being captured; a CPU has none."""
    if isinstance(device, torch.device):
        if device.type != "cuda":
            return False
        device = device.index
    # The public functions, and a change of the current device, cost more than the question.
    if torch._C._cuda_getDevice() == device:  # noqa: SLF001
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):  # a stream is current on each
        return torch.cuda.is_current_stream_capturing()
