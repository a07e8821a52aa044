"""Fixtures shared by all fault tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from tests.fixture_types import Patch


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: Patch) -> None:
    """Disable fsync: thousands of calls take minutes, and no real power failure happens here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(autouse=True)
def _garbage_is_collected_again() -> Iterator[None]:
    """Unfreeze the garbage collector that ``watch`` froze."""
    yield
    gc.unfreeze()
