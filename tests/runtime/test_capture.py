"""Tests of the capture state, which belongs to the current stream of each GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from mlagen.runtime.capture import is_capturing
from tests.fixture_types import Patch


@pytest.fixture
def current(monkeypatch: Patch) -> list[int]:
    """Make GPU 0 current and the stream of GPU 1 capturing; record device switches."""
    devices = [0]

    @contextmanager
    def device(chosen: int) -> Iterator[None]:
        devices.append(chosen)
        yield
        devices.append(0)

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: devices[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: devices[-1] == 1)
    return devices


@pytest.mark.parametrize("kind", [int, lambda index: torch.device("cuda", index)])
def test_each_gpu_has_a_current_stream(kind: type[int], current: list[int]) -> None:
    """The query switches to the given GPU and back."""
    assert is_capturing(kind(1))
    assert not is_capturing(kind(0))
    assert current == [0, 1, 0]


@pytest.mark.usefixtures("current")
def test_a_cpu_never_captures() -> None:
    """A CPU device makes no GPU query."""
    assert not is_capturing(torch.device("cpu"))
