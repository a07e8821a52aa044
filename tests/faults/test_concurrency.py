"""Concurrency, with and without working locks: the right kernel for each process, built once."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from mlagen.artifacts import Build
from mlagen.cache import eviction
from mlagen.cache.key import CacheKey
from mlagen.engine import find_or_build
from tests.cache import builds
from tests.cache.builds import CountedBuild, make_build, make_key, tree, wait_for
from tests.faults.crowds import crowd, received, send
from tests.faults.steps import KEY, store_in, warnings_in, whole_entries
from tests.kernels import COMBINE

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

CROWD = 32


@pytest.mark.timeout(60)
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


KEYS = [make_key(f"family {number}") for number in range(16)]


def cubin_of(key: CacheKey) -> bytes:
    """Return bytes that are unique to a kernel."""
    return builds.CUBIN + key.digest.encode() * 20


@pytest.mark.timeout(60)
def test_processes_that_evict_each_others_kernels_get_the_right_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 processes use 16 kernels in a small cache: no bytes are wrong, lost or damaged."""
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

    # Sequentially first, so that the working set exceeds the limit and some entries are evicted:
    # concurrent size updates can be lost, and then nothing is evicted.
    store = store_in(tmp_path, max_bytes=max_bytes)
    for key in KEYS:
        store.find_or_build(key, partial(build, key))
    assert whole_entries(tmp_path) < len(KEYS)

    statuses = crowd(CROWD, work)

    assert statuses == [0] * CROWD
    assert set(received(tmp_path)) == {key.digest for key in KEYS}
    assert len(received(tmp_path)) > len(KEYS)  # evicted entries were rebuilt
    # Concurrent size updates are lost until the next measurement.
    store.collect()
    assert whole_entries(tmp_path) > 0
    assert sum(weight.size_bytes for weight in eviction.entry_usages(store._layout)) <= max_bytes
    assert tree(tmp_path / "cache/v1/quarantine") == []
    assert tree(tmp_path / "cache/v1/staging") == []


@pytest.mark.timeout(30)
@pytest.mark.parametrize("repetition", range(3), ids="run {}".format)
def test_a_cache_that_is_cleared_continuously_serves_every_process(
    repetition: int, tmp_path: Path
) -> None:
    """Eight processes request a kernel while a ninth clears: each gets it, without a warning."""
    askers = 8

    def work(number: int) -> None:
        store = store_in(tmp_path)
        if number == askers:
            while len(received(tmp_path)) < askers:
                store.clear()
            return
        listener = Listener()
        logging.getLogger("mlagen").addHandler(listener)
        for key in KEYS[repetition:] + KEYS[:repetition]:
            entry = store.find_or_build(key, lambda: make_build(cubin_of(key)))  # noqa: B023
            assert entry.cubin == cubin_of(key)
        send(tmp_path, listener.messages)

    statuses = crowd(askers + 1, work)

    assert statuses == [0] * (askers + 1)
    assert received(tmp_path) == [[]] * askers
    assert whole_entries(tmp_path) <= len(KEYS)
    assert tree(tmp_path / "cache/v1/quarantine") == []


class Listener(logging.Handler):
    """Collects the warnings of a process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Append one."""
        self.messages.append(record.getMessage())


@pytest.mark.timeout(30)
def test_a_stopped_holder_of_the_lock_does_not_block_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the holder of the lock neither ends nor continues, the timeout ends the wait."""
    reader, writer = os.pipe()

    def hold() -> Build:
        os.write(writer, b"!")
        time.sleep(60)
        return make_build()

    holder = os.fork()
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
    assert entries[0].path == builds.entry_folder(tmp_path, KEY)
    (warning,) = warnings_in(caplog)
    assert warning.startswith("lock: expected within 0.3 s, got none, compiling without: ")


@pytest.mark.timeout(30)
def test_a_lock_file_that_is_deleted_while_held_costs_one_build_more(tmp_path: Path) -> None:
    """Two processes hold a lock of the same name: both build, and one publishes."""
    entered, release = threading.Event(), threading.Event()

    def slow() -> Build:
        entered.set()
        release.wait(15)
        return make_build()

    other = CountedBuild()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(store_in(tmp_path).find_or_build, KEY, slow)
        entered.wait(15)
        for file in (tmp_path / "locks").iterdir():
            file.unlink()
        second = store_in(tmp_path).find_or_build(KEY, other)
        release.set()

    assert other.calls == 1
    assert first.result().cubin == second.cubin == builds.CUBIN
    assert whole_entries(tmp_path) == 1
    assert tree(tmp_path / "cache/v1/staging") == []


@pytest.mark.timeout(60)
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
    assert tree(tmp_path / "cache/v1/staging") == []
