"""Concurrency, with and without working locks: the right kernel for each process, built once."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from mlagen.artifacts import Build
from mlagen.cache import eviction
from mlagen.cache.file import CacheEntry
from mlagen.cache.key import CacheKey
from mlagen.engine import find_or_build
from mlagen.jit import on_compile
from tests.cache import builds
from tests.cache.builds import CountedBuild, make_build, make_key, wait_for
from tests.faults.crowds import crowd, received, send
from tests.faults.steps import KEY, parts, store_in, warnings_in, whole_entries
from tests.fixture_types import Log, Patch
from tests.kernels import COMBINE, DECODE

pytestmark = pytest.mark.timeout(60)

CROWD = 32
KEYS = [make_key(f"family {number}") for number in range(16)]


def cubin_of(key: CacheKey) -> bytes:
    """Return bytes that are unique to a kernel."""
    return builds.CUBIN + key.digest.encode() * 20


def test_thirty_two_processes_compile_one_kernel_once(tmp_path: Path) -> None:
    """Started together on an empty cache, one process runs NVRTC and all get the same bytes."""

    def work(_: int) -> None:
        outcome = find_or_build(COMBINE)
        assert outcome.entry.path is not None
        send(tmp_path, [outcome.built, hashlib.sha256(outcome.entry.cubin).hexdigest()])

    statuses = crowd(CROWD, work)

    assert statuses == [0] * CROWD
    messages = received(tmp_path)
    assert sorted(built for built, _ in messages) == [False] * (CROWD - 1) + [True]
    assert len({digest for _, digest in messages}) == 1


def test_killing_the_compiling_process_lets_the_others_finish(
    tmp_path: Path, cache_dir: Path
) -> None:
    """After kill -9 during NVRTC, one waiting process compiles, and nothing is left over."""

    def work(number: int) -> None:
        if number == 4:
            wait_for(lambda: received(tmp_path))
            time.sleep(0.2)  # so that the others wait for the lock
            os.kill(received(tmp_path)[0][1], signal.SIGKILL)
            return
        on_compile(lambda event: send(tmp_path, [event.phase, os.getpid()]))
        assert find_or_build(DECODE).entry.path is not None

    statuses = crowd(5, work)

    assert sorted(statuses) == [-signal.SIGKILL, 0, 0, 0, 0]
    assert [phase for phase, _ in received(tmp_path)] == ["started", "started", "finished"]
    assert not find_or_build(DECODE).built
    assert len(list(cache_dir.glob("v2/*/*"))) == 1


@pytest.mark.parametrize("stores", ["one", "separate", "one that cannot publish"])
def test_sixty_four_threads_build_once(stores: str, tmp_path: Path, caplog: Log) -> None:
    """Concurrent threads of one process run one build and share its entry."""
    if is_blocked := stores == "one that cannot publish":
        (tmp_path / "cache").touch()
    shared, build = store_in(tmp_path), CountedBuild(seconds=0.1)

    def ask() -> CacheEntry:
        store = store_in(tmp_path) if stores == "separate" else shared
        return store.find_or_build(KEY, build)

    entries = builds.together([ask] * 64)

    assert build.calls == 1
    assert {entry.cubin for entry in entries} == {builds.CUBIN}
    expected = None if is_blocked else builds.entry_path(tmp_path, KEY)
    assert {entry.path for entry in entries} == {expected}
    assert len(warnings_in(caplog)) == is_blocked


def test_an_error_reaches_every_thread(tmp_path: Path) -> None:
    """All waiting threads get the exception, nothing is published, and a later call builds."""
    store = store_in(tmp_path)
    failing, build = CountedBuild(seconds=0.3, error=LookupError("no template")), CountedBuild()

    def ask() -> str:
        with pytest.raises(LookupError) as caught:
            store.find_or_build(KEY, failing)
        return str(caught.value)

    assert builds.together([ask] * 16) == ["no template"] * 16
    assert failing.calls == 1
    assert list(store.entries()) == []
    assert parts(tmp_path) == []
    assert store.find_or_build(KEY, build).cubin == builds.CUBIN
    assert build.calls == 1


@pytest.mark.parametrize("publishes", [True, False], ids=["with a folder", "without a folder"])
def test_a_child_forked_in_the_middle_of_a_build_does_not_hang(
    publishes: bool, tmp_path: Path
) -> None:
    """It waits for the lock like any process, then builds; the parent is not affected."""
    if not publishes:
        (tmp_path / "cache").touch()
    store = store_in(tmp_path, lock_timeout_s=0.2)
    inside, release = threading.Event(), threading.Event()

    def build() -> Build:
        inside.set()
        release.wait(10)
        return make_build()

    with ThreadPoolExecutor(1) as pool:
        parent = pool.submit(store.find_or_build, KEY, build)
        inside.wait(10)
        status = builds.in_child(lambda: store.find_or_build(KEY, make_build))
        release.set()

    assert status == 0
    assert parent.result().cubin == builds.CUBIN
    assert (store.find(KEY) or parent.result()).cubin == builds.CUBIN
    assert os.getpid() == parent.result().manifest.created["pid"]


def test_processes_that_evict_each_others_kernels_get_the_right_ones(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """16 processes use 16 kernels in a small cache: no bytes are wrong, lost or damaged."""
    monkeypatch.setattr(eviction, "RECENT_USE_S", -1.0)
    max_bytes = 3 * 6000

    def build(key: CacheKey) -> Build:
        send(tmp_path, key.digest)
        return make_build(cubin_of(key))

    def work(number: int) -> None:
        chance = random.Random(number)  # noqa: S311 - no secret
        store = store_in(tmp_path, max_bytes=max_bytes)
        for key in chance.choices(KEYS, k=24):
            entry = store.find_or_build(key, partial(build, key))
            assert entry.cubin == cubin_of(key)
            assert entry.manifest.key == key.digest
            assert entry.path is not None

    # Sequentially first, so that the working set exceeds the limit and some entries are evicted.
    store = store_in(tmp_path, max_bytes=max_bytes)
    for key in KEYS:
        store.find_or_build(key, partial(build, key))
    assert whole_entries(tmp_path) < len(KEYS)

    statuses = crowd(CROWD // 2, work)

    assert statuses == [0] * (CROWD // 2)
    assert set(received(tmp_path)) == {key.digest for key in KEYS}
    assert len(received(tmp_path)) > len(KEYS)  # evicted entries were rebuilt
    assert whole_entries(tmp_path) > 0
    store.collect()
    assert sum(stored.size_bytes for stored in store.entries()) <= max_bytes
    assert parts(tmp_path) == []


@pytest.mark.parametrize("repetition", range(2), ids="run {}".format)
def test_a_cache_that_is_cleared_continuously_serves_every_process(
    repetition: int, tmp_path: Path, caplog: Log
) -> None:
    """Eight processes request a kernel while a ninth clears: each gets it, without a warning."""
    askers = 8

    def work(number: int) -> None:
        store = store_in(tmp_path)
        if number == askers:
            while len(received(tmp_path)) < askers:
                store.clear()
            return
        for key in KEYS[repetition:] + KEYS[:repetition]:
            entry = store.find_or_build(key, lambda: make_build(cubin_of(key)))  # noqa: B023
            assert entry.cubin == cubin_of(key)
        send(tmp_path, warnings_in(caplog))

    statuses = crowd(askers + 1, work)

    assert statuses == [0] * (askers + 1)
    assert received(tmp_path) == [[]] * askers
    assert whole_entries(tmp_path) <= len(KEYS)


def test_a_stopped_holder_of_the_lock_does_not_block_others(tmp_path: Path, caplog: Log) -> None:
    """If the holder of the lock neither ends nor continues, the timeout ends the wait."""
    reader, writer = os.pipe()

    def hold() -> Build:
        os.write(writer, b"!")
        time.sleep(60)
        return make_build()

    holder = builds.fork()
    if holder == 0:
        store_in(tmp_path).find_or_build(KEY, hold)
        os._exit(1)
    os.read(reader, 1)
    build = CountedBuild()
    try:
        entries = [store_in(tmp_path, lock_timeout_s=0.3).find_or_build(KEY, build) for _ in "ab"]
    finally:
        os.kill(holder, 9)
        os.waitpid(holder, 0)
        os.close(reader)
        os.close(writer)

    assert build.calls == 1
    assert [entry.cubin for entry in entries] == [builds.CUBIN] * 2
    assert entries[0].path == builds.entry_path(tmp_path, KEY)
    (warning,) = warnings_in(caplog)
    assert warning.startswith("lock: expected within 0.3 s, got none, compiling without: ")


@pytest.mark.parametrize("what", ["the files", "the folder"])
def test_locks_that_are_deleted_while_processes_wait(what: str, tmp_path: Path) -> None:
    """While eight processes wait, the locks are deleted: some build twice, none fails."""
    waiting = 8

    def build() -> Build:
        send(tmp_path, "built")
        wait_for((tmp_path / "cleaned").exists)
        return make_build()

    def work(_: int) -> None:
        entry = store_in(tmp_path, lock_timeout_s=20.0).find_or_build(KEY, build)
        assert entry.cubin == builds.CUBIN

    def clean(number: int) -> None:
        if number < waiting:
            work(number)
            return
        wait_for(lambda: received(tmp_path))
        for _ in range(20):
            if what == "the folder":
                shutil.rmtree(tmp_path / "locks", ignore_errors=True)
            else:
                for file in (tmp_path / "locks").iterdir():
                    file.unlink()
            time.sleep(0.01)  # so that the others meet it in between, too
        (tmp_path / "cleaned").touch()

    statuses = crowd(waiting + 1, clean)

    assert statuses == [0] * (waiting + 1)
    assert 1 <= len(received(tmp_path)) <= waiting
    assert whole_entries(tmp_path) == 1
    assert parts(tmp_path) == []
