"""Sinks at and around the limits of float32, one per head of 16."""

from __future__ import annotations

import math

import torch

# Times log2(e), the first six overflow float32.
_VALUES = (
    *(3.4028235e38, -3.4028235e38, 3e38, -3e38, 2.4e38, -2.4e38),
    *(2.3e38, -2.3e38, 1e30, -1e30, 200.0, -200.0, 0.0, math.inf, -math.inf, math.nan),
)


def extreme_sinks(device: str) -> torch.Tensor:
    """Return the sinks of 16 heads."""
    return torch.tensor(_VALUES, device=device)
