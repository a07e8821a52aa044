"""Fixtures of the tests of both families."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.families.entry_points import ROWS, EntryPoint, make_entry_point
from tests.families.launches import Launches, record_launches, simulate_h200
from tests.fixture_types import Patch


@pytest.fixture
def launches(monkeypatch: Patch) -> Launches:
    """Record launches."""
    return record_launches(monkeypatch)


@pytest.fixture
def h200(monkeypatch: Patch) -> Iterator[None]:
    """Plan for an H200 as GPU 0, which need not be there."""
    yield from simulate_h200(monkeypatch)


@pytest.fixture(params=ROWS)
def entry_point(request: pytest.FixtureRequest, monkeypatch: Patch) -> EntryPoint:
    """Return an entry point with an empty call cache."""
    return make_entry_point(monkeypatch, ROWS[request.param])
