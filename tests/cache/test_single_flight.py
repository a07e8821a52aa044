"""Single flight: one thread works, concurrent callers get its result."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlagen.cache.single_flight import SingleFlight
from tests.cache.builds import in_child


def test_other_keys_do_not_wait() -> None:
    """A call for another key runs concurrently."""
    flights = SingleFlight[str]()
    result = flights.run("one", lambda: flights.run("two", lambda: "inner"))
    assert result == "inner"


def test_nothing_is_kept_after_a_flight() -> None:
    """A second call works again: results are not cached."""
    flights, calls = SingleFlight[None](), []
    for _ in range(2):
        flights.run("key", lambda: calls.append(1))
    assert len(calls) == 2


def test_a_forked_child_does_not_wait_for_its_parent() -> None:
    """A child forked during a flight works by itself."""
    flights, inside, release = SingleFlight[str](), threading.Event(), threading.Event()

    def work() -> str:
        inside.set()
        release.wait(10)
        return "parent"

    with ThreadPoolExecutor(1) as pool:
        flight = pool.submit(flights.run, "key", work)
        inside.wait(10)
        status = in_child(lambda: flights.run("key", lambda: "child"))
        release.set()

    assert status == 0
    assert flight.result() == "parent"


def test_work_that_requests_its_own_key_raises() -> None:
    """Work that requests its own key raises instead of deadlocking."""
    flights = SingleFlight[object]()
    with pytest.raises(RuntimeError, match="kernel key: expected no request while building it"):
        flights.run("key", lambda: flights.run("key", object))
    assert flights.run("key", lambda: 1) == 1
