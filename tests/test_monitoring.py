"""Process metrics: fixed names, and exact sums across threads and forks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import mlagen
from mlagen.monitoring import count, metrics
from tests.cache.builds import in_child


def test_metrics_are_integers_with_fixed_names() -> None:
    """Every name is present from the start, and every value is an integer."""
    before = metrics()
    count("compile_ms", 12.4)
    assert {type(value) for value in metrics().values()} == {int}
    assert metrics().keys() == before.keys()
    # 12.4 more, on top of an earlier fraction of a millisecond.
    assert metrics()["compile_ms"] - before["compile_ms"] in (12, 13)
    assert mlagen.metrics() == metrics()


def test_an_unknown_metric_is_an_error() -> None:
    """Only declared metrics can be counted."""
    with pytest.raises(KeyError):
        count("coffee")


def test_threads_lose_no_increment() -> None:
    """Eight threads that add a thousand each add eight thousand."""
    before = metrics()["waits"]

    def count_a_thousand(_: int) -> None:
        for _ in range(1000):
            count("waits")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count_a_thousand, range(8)))
    assert metrics()["waits"] - before == 8000


def test_a_forked_child_counts_on() -> None:
    """A child starts with the parent's values, and waits for no lock of the parent."""
    from mlagen import monitoring

    before = metrics()["waits"]

    def work() -> None:
        count("waits")
        assert metrics()["waits"] == before + 1

    with monitoring._counting:
        status = in_child(work)

    assert status == 0
    assert metrics()["waits"] == before
