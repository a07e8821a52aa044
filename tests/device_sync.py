"""Check that a call does not synchronize with the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_device_sync() -> Iterator[None]:
    """Raise if torch synchronizes with the device."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch may miss some kinds of synchronization
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
