"""Prewarm builds: sequential look-ups, then parallel compilation of what is missing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

from mlagen.cache.store import kernel_store
from mlagen.compiler.process import CompileProcesses, CompileTimeoutError
from mlagen.engine import build_missing, key_of
from mlagen.errors import CacheError, MlagenError
from mlagen.prewarming.report import PrewarmUnit, Progress, unit_of
from mlagen.settings import current_settings
from mlagen.spec.kernel import KernelSpec

_logger = logging.getLogger("mlagen")


def look_up_all(specs: Sequence[KernelSpec], *, is_dry: bool) -> Iterator[PrewarmUnit]:
    """Yield a hit or missing unit for each kernel; if ``is_dry``, change nothing but warn too."""
    problems: dict[str, None] = {}
    for spec in specs:
        start = time.perf_counter()
        key = key_of(spec)
        found = kernel_store().look_up(key, is_dry=is_dry)
        entry = found.entry
        if is_dry and found.problem and found.problem not in problems:
            problems[found.problem] = None
            _logger.warning("cache: %s, so missing: %s: %s", found.reason, spec, found.problem)
        status = "hit" if entry else "missing"
        yield unit_of(spec, key, status, start, entry=entry, reason=found.reason)


def build_all(
    missing: Sequence[PrewarmUnit],
    jobs: int,
    build: Callable[[PrewarmUnit], PrewarmUnit],
    progress: Progress,
    *,
    fail_fast: bool = False,
    stop: Callable[[], None] = lambda: None,
) -> None:
    """Build kernels in threads, and report each start and each end in order of occurrence.

    If an exception interrupts it, ``stop`` is called. After Ctrl-C, the kernels that were built
    meanwhile are reported too.
    """
    events: SimpleQueue[KernelSpec | Future[PrewarmUnit]] = SimpleQueue()
    built: dict[KernelSpec, PrewarmUnit] = {}  # not reported yet
    has_failed = threading.Event()

    def begin(unit: PrewarmUnit) -> PrewarmUnit:
        if fail_fast and has_failed.is_set():
            return replace(unit, status="skipped")
        events.put(unit.spec)
        unit = build(unit)
        if unit.error is None:
            built[unit.spec] = unit
        else:
            has_failed.set()
        return unit

    pool = ThreadPoolExecutor(jobs, thread_name_prefix="mlagen-prewarm")
    try:
        for unit in missing:
            pool.submit(begin, unit).add_done_callback(events.put)
        num_pending = len(missing)
        while num_pending:
            event = events.get()
            if isinstance(event, Future):
                unit = event.result()
                built.pop(unit.spec, None)
                progress.report("finished", unit.spec, unit)
                num_pending -= 1
            else:
                progress.report("started", event)
    except BaseException as error:
        stop()
        pool.shutdown(cancel_futures=True)  # running compilations finish
        if isinstance(error, KeyboardInterrupt):
            for unit in built.values():
                progress.report("finished", unit.spec, unit)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def build_unit(
    missing: PrewarmUnit,
    *,
    processes: CompileProcesses | None = None,
    may_stay_in_memory: bool = False,
) -> PrewarmUnit:
    """Compile a missing kernel, with ``processes`` in one of its own."""
    start, spec = time.perf_counter(), missing.spec
    compiler = processes.compile if processes else None
    try:
        outcome = build_missing(
            spec, missing.reason or "absent", created_by="prewarm", compiler=compiler
        )
        if outcome.entry.path is None and not may_stay_in_memory:
            path = current_settings().cache_dir
            raise CacheError(f"cache: expected an entry on the disk, got none: {path}", path=path)
    except MlagenError as error:
        status = "timeout" if isinstance(error, CompileTimeoutError) else "failed"
        return unit_of(spec, key_of(spec), status, start, error=error)
    status = "built" if outcome.built else "hit"
    return unit_of(spec, key_of(spec), status, start, entry=outcome.entry)
