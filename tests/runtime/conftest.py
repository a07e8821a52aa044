"""GPUs of which one is current, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make GPU 0 current; return the GPUs that become current, one after the other."""
    devices = [0]

    @contextmanager
    def switched(chosen: int) -> Iterator[None]:
        devices.append(chosen)
        yield
        devices.append(0)

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: devices[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", switched)
    return devices
