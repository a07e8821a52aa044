"""How a test sees that nothing waits for the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise where torch would wait for the device."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it may not notice every kind of waiting
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
