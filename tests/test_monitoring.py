"""The counters of a process: complete names, sums that are right, also among threads and forks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import mlagen
from mlagen.monitoring import count, metrics
from tests.cache.builds import in_child


def test_counters_are_whole_numbers_under_fixed_names() -> None:
    """A monitor finds every name from the first moment on, and integers only."""
    before = metrics()

    count("compile_ms", 12.4)

    assert {type(value) for value in metrics().values()} == {int}
    assert metrics().keys() == before.keys()
    # Of 12.4 more, with what there was of another millisecond before.
    assert metrics()["compile_ms"] - before["compile_ms"] in (12, 13)
    assert mlagen.metrics() == metrics()


def test_a_count_without_a_name_is_a_mistake() -> None:
    """Nobody counts what nobody would find."""
    with pytest.raises(KeyError):
        count("coffee")


def test_no_addition_of_threads_is_lost() -> None:
    """Eight threads that add a thousand each have added eight thousand."""
    before = metrics()["waits"]

    def count_a_thousand(_: int) -> None:
        for _ in range(1000):
            count("waits")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count_a_thousand, range(8)))

    assert metrics()["waits"] - before == 8000


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_of_a_fork_counts_on() -> None:
    """It begins with the parent's counts, and waits for no lock that the parent held."""
    from mlagen import monitoring

    before = metrics()["waits"]

    def work() -> None:
        count("waits")
        assert metrics()["waits"] == before + 1

    with monitoring._counting:
        status = in_child(work)

    assert status == 0
    assert metrics()["waits"] == before
