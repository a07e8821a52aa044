"""Fixtures of the tests of both families."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.families.launches import Launch, record_launches, simulate_h200


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Record launches."""
    return record_launches(monkeypatch)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plan for an H200 as GPU 0, which need not be there."""
    yield from simulate_h200(monkeypatch)
