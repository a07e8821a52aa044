"""Concurrent processes, threads and forks: one build, and no partial entry after a crash."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlagen.artifacts import Build
from tests.cache import builds
from tests.cache.builds import (
    CountedBuild,
    make_build,
    make_key,
    make_store,
    start_worker,
    tree,
    wait_for,
)

KEY = make_key()


def builder_pids(folder: Path) -> list[int]:
    """Return the process of each started build."""
    marker = folder / "builds"
    return [int(line) for line in marker.read_text().split()] if marker.exists() else []


def run_together(folder: Path, count: int, *, seconds: float) -> list[str]:
    """Let ``count`` processes request one kernel concurrently; return the state of their bytes."""
    workers = [start_worker(folder, seconds=seconds) for _ in range(count)]
    wait_for(lambda: len(list(folder.glob("ready.*"))) == count)
    (folder / "go").touch()
    outputs = [worker.communicate(timeout=15)[0].strip() for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * count
    return outputs


@pytest.mark.timeout(20)
def test_sixteen_processes_build_once(tmp_path: Path) -> None:
    """Processes that start together on an empty cache run one build, and all get its bytes."""
    outputs = run_together(tmp_path, 16, seconds=0.3)

    assert len(builder_pids(tmp_path)) == 1
    assert outputs == ["intact"] * 16
    assert tree(tmp_path / "cache/v1/staging") == []


@pytest.mark.timeout(20)
def test_processes_without_locks_leave_one_intact_entry(tmp_path: Path) -> None:
    """Without locking all may build; the rename keeps one complete entry."""
    (tmp_path / "locks").touch()

    outputs = run_together(tmp_path, 6, seconds=0.3)

    assert len(builder_pids(tmp_path)) > 1
    assert outputs == ["intact"] * 6
    store = make_store(tmp_path)
    (stored,) = store.entries()
    assert store.verify(stored) is None
    assert tree(tmp_path / "cache/v1/staging") == []


@pytest.mark.timeout(20)
def test_killing_the_builder_lets_the_others_finish(tmp_path: Path) -> None:
    """After kill -9 during a build, a waiting process builds at once."""
    (tmp_path / "go").touch()
    victim = start_worker(tmp_path, seconds=60)
    wait_for(lambda: builder_pids(tmp_path))
    others = [start_worker(tmp_path, seconds=0) for _ in range(3)]
    wait_for(lambda: len(list(tmp_path.glob("ready.*"))) == 4)
    time.sleep(0.5)  # until the others wait for the lock
    assert [worker.poll() for worker in others] == [None] * 3

    victim.kill()
    killed = time.monotonic()
    outputs = [worker.communicate(timeout=10)[0].strip() for worker in others]
    waited_s = time.monotonic() - killed

    assert victim.wait() == -signal.SIGKILL
    assert outputs == ["intact"] * 3
    assert len(builder_pids(tmp_path)) == 2
    assert waited_s < 3
    victim.communicate()


@pytest.mark.timeout(20)
def test_sixty_four_threads_build_once(tmp_path: Path) -> None:
    """Concurrent threads of one process run one build and share its entry."""
    store, build = make_store(tmp_path), CountedBuild(seconds=0.1)

    entries = builds.together([lambda: store.find_or_build(KEY, build)] * 64)

    assert build.calls == 1
    assert {entry.cubin for entry in entries} == {builds.CUBIN}
    assert {entry.path for entry in entries} == {builds.entry_folder(tmp_path, KEY)}


@pytest.mark.timeout(20)
def test_threads_with_separate_stores_build_once(tmp_path: Path) -> None:
    """The lock excludes threads of one process too."""
    build = CountedBuild(seconds=0.1)

    entries = builds.together([lambda: make_store(tmp_path).find_or_build(KEY, build)] * 8)

    assert build.calls == 1
    assert {entry.cubin for entry in entries} == {builds.CUBIN}


@pytest.mark.timeout(20)
def test_threads_that_cannot_publish_build_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a writable folder, a process still builds each kernel once and warns once."""
    (tmp_path / "cache").touch()
    store, build = make_store(tmp_path), CountedBuild(seconds=0.1)

    entries = builds.together([lambda: store.find_or_build(KEY, build)] * 64)

    assert build.calls == 1
    assert {entry.path for entry in entries} == {None}
    assert len(caplog.records) == 1


@pytest.mark.timeout(20)
def test_an_error_reaches_every_thread(tmp_path: Path) -> None:
    """All waiting threads get the exception, nothing is published, and a later call builds."""
    store = make_store(tmp_path)
    failing, build = CountedBuild(seconds=0.3, error=LookupError("no template")), CountedBuild()

    def ask() -> str:
        with pytest.raises(LookupError) as caught:
            store.find_or_build(KEY, failing)
        return str(caught.value)

    outputs = builds.together([ask] * 16)

    assert outputs == ["no template"] * 16
    assert failing.calls == 1
    assert list(store.entries()) == []
    assert store.find_or_build(KEY, build).cubin == builds.CUBIN
    assert build.calls == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_finds_and_builds(tmp_path: Path) -> None:
    """A child forked after a hit uses the same store object: it hits, builds, and publishes."""
    store, other = make_store(tmp_path), make_key("another kernel")
    store.find_or_build(KEY, make_build)
    assert store.find(KEY) is not None

    def work() -> None:
        assert store.find(KEY) is not None
        assert store.find_or_build(other, make_build).path is not None

    assert builds.in_child(work) == 0
    assert store.find(other) is not None


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("publishes", [True, False], ids=["with a folder", "without a folder"])
def test_a_child_forked_in_the_middle_of_a_build_does_not_hang(
    publishes: bool, tmp_path: Path
) -> None:
    """It waits for the lock like any process, then builds; the parent is not affected."""
    if not publishes:
        (tmp_path / "cache").touch()
    store = make_store(tmp_path, lock_timeout_s=0.2)
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
