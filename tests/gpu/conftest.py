"""Tests that every device runs take CUDA tensors here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sm90_tiles import sm90_kernels


@pytest.fixture
def device() -> str:
    """Return the GPU."""
    return "cuda"


@pytest.fixture
def sm90(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make every call use an sm90 kernel with its default tile."""
    with sm90_kernels(monkeypatch):
        yield
