"""Kernels looked up one after the other, and built several at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

from mlagen.cache.default_store import kernel_store
from mlagen.engine import find_or_build, key_of
from mlagen.errors import CacheError, MlagenError
from mlagen.prewarming.report import Happening, PrewarmUnit, unit_of
from mlagen.settings import current_settings
from mlagen.spec.kernel import KernelSpec


def look_up_all(
    specs: Sequence[KernelSpec], *, is_dry: bool
) -> Generator[tuple[str, KernelSpec, PrewarmUnit], None, None]:
    """Yield a unit for each kernel: a hit, or what is missing; if ``is_dry``, change nothing."""
    for spec in specs:
        start = time.perf_counter()
        key = key_of(spec)
        entry = kernel_store().look_up(key, is_dry=is_dry).entry
        status = "hit" if entry else "missing"
        yield "finished", spec, unit_of(spec, key, status, start, entry=entry)


def build_all(
    specs: Sequence[KernelSpec],
    jobs: int,
    build: Callable[[KernelSpec], PrewarmUnit],
    *,
    fail_fast: bool = False,
    stop: Callable[[], None] = lambda: None,
    late: Callable[[PrewarmUnit], object] = lambda _: None,
) -> Generator[Happening, None, None]:
    """Yield each start and each end, in the order in which they happen.

    ``stop`` is called when the caller goes away before the end, from Ctrl-C for instance, and then
    ``late`` with each unit that is finished all the same and was not yielded.
    """
    happened: SimpleQueue[KernelSpec | Future[PrewarmUnit]] = SimpleQueue()
    has_failed = threading.Event()

    def begin(spec: KernelSpec) -> PrewarmUnit:
        if fail_fast and has_failed.is_set():
            return unit_of(spec, key_of(spec), "skipped", time.perf_counter())
        happened.put(spec)
        unit = build(spec)
        if unit.error is not None:
            has_failed.set()
        return unit

    pool = ThreadPoolExecutor(jobs, thread_name_prefix="mlagen-prewarm")
    left: set[Future[PrewarmUnit]] = set()
    try:
        for spec in specs:
            left.add(future := pool.submit(begin, spec))
            future.add_done_callback(happened.put)
        while left:
            it = happened.get()
            if isinstance(it, Future):
                unit = it.result()
                yield "finished", unit.spec, unit
                left.discard(it)
            else:
                yield "started", it, None
    except BaseException:
        stop()
        raise
    finally:
        # Also after Ctrl-C: what is being compiled is finished, what waits is dropped.
        pool.shutdown(cancel_futures=True)
        for future in left:
            if future.done() and not future.cancelled() and future.exception() is None:
                late(future.result())


def build_here(spec: KernelSpec, *, may_stay_in_memory: bool = False) -> PrewarmUnit:
    """Compile a kernel in this process, unless the cache has it."""
    start = time.perf_counter()
    key = key_of(spec)
    try:
        outcome = find_or_build(spec, created_by="prewarm")
        if outcome.entry.path is None and not may_stay_in_memory:
            path = current_settings().cache_dir
            raise CacheError(f"cache: expected an entry on the disk, got none: {path}", path=path)
    except MlagenError as error:
        return unit_of(spec, key, "failed", start, error=error)
    return unit_of(spec, key, "built" if outcome.built else "hit", start, entry=outcome.entry)
