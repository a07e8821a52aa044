"""What all tests of faults share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush nothing for real: thousands of times that would be minutes, and no power fails here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(autouse=True)
def _garbage_is_collected_again() -> Iterator[None]:
    """Once the steps of a test are over, what ``watch`` kept from collection is like any other."""
    yield
    gc.unfreeze()
