"""Tests that every device runs take CUDA tensors here."""

from __future__ import annotations

import pytest


@pytest.fixture
def device() -> str:
    """Return the GPU."""
    return "cuda"
