"""Wrong, jumping and unsynchronized clocks: no kernel and no entry is lost."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cache import builds
from tests.cache.builds import CountedBuild, entry_path, make_build, make_key
from tests.faults.steps import KEY, ask, parts, store_in, warnings_in, whole_entries
from tests.fixture_types import Log, Patch

YEAR_S = 365 * 86400.0
KEYS = [make_key(f"family {number}") for number in range(6)]
REAL_TIME = time.time


def set_clock(monkeypatch: Patch, *, ahead_s: float) -> None:
    """Set the clock of this machine; files get the time of the file server."""
    monkeypatch.setattr(time, "time", lambda: REAL_TIME() + ahead_s)


SKEWS = {
    "a year behind": -YEAR_S,
    "two hours behind": -7200.0,
    "two hours ahead": 7200.0,
    "a year ahead": YEAR_S,
}


@pytest.mark.parametrize("ahead_s", SKEWS.values(), ids=SKEWS)
def test_a_wrong_clock_finds_builds_and_publishes(
    ahead_s: float, tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """Earlier entries are hits, new ones are published, and other processes find them silently."""
    ask(tmp_path, KEYS[0])
    set_clock(monkeypatch, ahead_s=ahead_s)
    build = CountedBuild()

    found = ask(tmp_path, KEYS[0], build)
    made = ask(tmp_path, KEYS[1], build)
    set_clock(monkeypatch, ahead_s=0.0)
    later = ask(tmp_path, KEYS[1], build)

    assert build.calls == 1
    assert (found.path, made.path) == (
        entry_path(tmp_path, KEYS[0]),
        entry_path(tmp_path, KEYS[1]),
    )
    assert later == made
    assert whole_entries(tmp_path) == 2
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("ahead_s", SKEWS.values(), ids=SKEWS)
def test_a_wrong_clock_keeps_the_cache_within_its_limit(
    ahead_s: float, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Whatever the clock was before, the oldest entries are evicted once it is right."""
    set_clock(monkeypatch, ahead_s=ahead_s)
    for number, key in enumerate(KEYS):
        ask(tmp_path, key)
        used = REAL_TIME() + ahead_s - 60.0 * (len(KEYS) - number)
        os.utime(entry_path(tmp_path, key), (used, used))
    set_clock(monkeypatch, ahead_s=0.0)
    store = store_in(tmp_path, max_bytes=1)

    first = store.collect()
    set_clock(monkeypatch, ahead_s=7200.0)
    second = store.collect()

    # A time in the future counts as used now, once, and is old two hours later.
    expected = [] if ahead_s > 0 else [entry_path(tmp_path, key) for key in KEYS]
    assert [weight.path for weight in first.evicted] == expected
    assert len(first.evicted) + len(second.evicted) == len(KEYS)
    assert whole_entries(tmp_path) == 0


TIMES = {"at the epoch": 0.0, "before it": -86400.0, "far in the future": 8e9}


@pytest.mark.parametrize("moment", TIMES.values(), ids=TIMES)
def test_an_entry_of_any_time_is_found_listed_and_renewed(moment: float, tmp_path: Path) -> None:
    """A hit corrects its time, so that it is neither evicted first nor protected for ever."""
    ask(tmp_path)
    path = entry_path(tmp_path, KEY)
    os.utime(path, (moment, moment))

    (listed,) = store_in(tmp_path).entries()
    found = store_in(tmp_path).find(KEY)

    assert listed.used == pytest.approx(min(moment, REAL_TIME()), abs=10)
    assert listed.problem is None
    assert found is not None
    assert path.stat().st_mtime == pytest.approx(REAL_TIME(), abs=10)


@pytest.mark.parametrize("ahead_s", SKEWS.values(), ids=SKEWS)
def test_a_builder_swept_by_a_wrong_clock_still_has_its_kernel(
    ahead_s: float, tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """A builder loses at most its publication, completely, with one message."""
    link, swept = os.link, list[int]()

    def sweep_first(*args: Any, **kwargs: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: REAL_TIME() + ahead_s)
            swept.append(len(store_in(tmp_path).sweep()))
        link(*args, **kwargs)

    monkeypatch.setattr(os, "link", sweep_first)

    entry = store_in(tmp_path).find_or_build(KEY, make_build)

    assert set(swept) == {1}
    assert (entry.cubin, entry.path) == (builds.CUBIN, None)
    assert whole_entries(tmp_path) == 0
    assert len(warnings_in(caplog)) == 1
    assert parts(tmp_path) == []


def test_a_clock_that_jumps_while_waiting_for_a_lock_does_not_count(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """The wait for another process uses the monotonic clock."""
    import filelock

    (tmp_path / "locks").mkdir()
    lock = filelock.FileLock(tmp_path / f"locks/{KEY.digest}.{KEY.toolchain}.lock")
    jumps = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: REAL_TIME() + YEAR_S * next(jumps))

    with lock:
        start = time.monotonic()
        entry = store_in(tmp_path, lock_timeout_s=0.4).find_or_build(KEY, make_build)
        waited_s = time.monotonic() - start

    assert entry.cubin == builds.CUBIN
    assert 0.4 <= waited_s < 5
