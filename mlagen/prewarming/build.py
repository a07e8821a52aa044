"""Prewarm builds: sequential look-ups, then parallel compilation of what is missing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

from mlagen.cache.store import kernel_store
from mlagen.compiler.process import CompileProcesses, CompileTimeoutError
from mlagen.engine import build_missing, key_of
from mlagen.errors import CacheError, MlagenError
from mlagen.prewarming.report import PrewarmUnit, RawEvent, unit_of
from mlagen.settings import current_settings
from mlagen.spec.kernel import KernelSpec

_logger = logging.getLogger("mlagen")


def look_up_all(
    specs: Sequence[KernelSpec], *, is_dry: bool
) -> Generator[tuple[str, KernelSpec, PrewarmUnit], None, None]:
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
        yield "finished", spec, unit_of(spec, key, status, start, entry=entry, reason=found.reason)


def build_all(
    missing: Sequence[PrewarmUnit],
    jobs: int,
    build: Callable[[PrewarmUnit], PrewarmUnit],
    *,
    fail_fast: bool = False,
    stop: Callable[[], None] = lambda: None,
    on_late_unit: Callable[[PrewarmUnit], object] = lambda _: None,
) -> Generator[RawEvent, None, None]:
    """Yield an event for each start and each end of a build, in order of occurrence.

    If the caller stops early, by Ctrl-C for instance, ``stop`` is called, and then
    ``on_late_unit`` with each finished unit that was not yielded.
    """
    events: SimpleQueue[KernelSpec | Future[PrewarmUnit]] = SimpleQueue()
    finished: dict[KernelSpec, PrewarmUnit] = {}  # not yielded yet
    has_failed = threading.Event()

    def begin(unit: PrewarmUnit) -> PrewarmUnit:
        if fail_fast and has_failed.is_set():
            unit = replace(unit, status="skipped")
        else:
            events.put(unit.spec)
            unit = build(unit)
            if unit.error is not None:
                has_failed.set()
        finished[unit.spec] = unit
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
                yield "finished", unit.spec, unit
                del finished[unit.spec]
                num_pending -= 1
            else:
                yield "started", event, None
    except BaseException:
        stop()
        raise
    finally:
        # Also after Ctrl-C: running compilations finish, waiting ones are canceled.
        pool.shutdown(cancel_futures=True)
        for unit in finished.values():
            on_late_unit(unit)


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
