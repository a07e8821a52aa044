"""What all tests of faults share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush nothing for real: thousands of times that would be minutes, and no power fails here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
