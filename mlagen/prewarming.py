"""Prewarming: kernels compiled, and loaded if asked, before the first call needs them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias

from mlagen.cache.entry import CacheEntry
from mlagen.cache.key import CacheKey
from mlagen.cache.layout import Layout
from mlagen.cache.publish import require_writable
from mlagen.engine import find_or_build, kernel_for, kernel_store, key_of
from mlagen.errors import ArgumentError, CacheError, MlagenError, UnsupportedError
from mlagen.runtime.device import visible_devices
from mlagen.settings import current_settings
from mlagen.spec.arch import Arch, arch_of_capability, parse_arch
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.selection import select_specs


@dataclass(frozen=True, kw_only=True)
class PrewarmUnit:
    """One kernel, and what became of it; the facts of an entry are None where there is none."""

    spec: KernelSpec
    key: str
    toolchain: str
    status: str  # "hit", "built" or "failed"; in a dry run "hit" or "missing"
    ms: float
    registers: int | None = None
    spill_bytes: int | None = None
    cubin_bytes: int | None = None
    error: MlagenError | None = None


@dataclass(frozen=True, kw_only=True)
class PrewarmEvent:
    """Progress: a kernel was ``started`` (being compiled), ``finished`` or ``loaded``."""

    kind: str
    spec: KernelSpec
    unit: PrewarmUnit | None  # of what is finished
    done: int  # units finished
    total: int


# What an event tells, before it is counted.
Happening: TypeAlias = tuple[str, KernelSpec, PrewarmUnit | None]


@dataclass(frozen=True, kw_only=True)
class PrewarmReport:
    """What a prewarm came to."""

    units: tuple[PrewarmUnit, ...]  # in the order of the specs
    loaded: int  # kernels, times GPUs
    ms: float

    def totals(self) -> dict[str, int | float]:
        """Return how many units there are of each status, and the time it took."""
        statuses = [unit.status for unit in self.units]
        counts = {name: statuses.count(name) for name in ("hit", "built", "failed", "missing")}
        return {"units": len(statuses), **counts, "loaded": self.loaded, "ms": self.ms}


def prewarm(
    archs: str | Iterable[str] = "native",
    *,
    families: Iterable[str] | None = None,
    heads: int | Iterable[int] | None = None,
    kv_heads: int | Iterable[int] | None = None,
    q_len: int | Iterable[int] | None = None,
    jobs: int | None = None,
    dry_run: bool = False,
    load: bool = False,
    on_event: Callable[[PrewarmEvent], None] | None = None,
    **wanted: str | int | Iterable[str | int],
) -> PrewarmReport:
    """Compile every supported kernel that the arguments leave, unless the cache has it.

    Needs a GPU for ``archs="native"`` and ``load`` only, and torch for ``load`` only. A kernel that
    does not compile is in the report and stops no other. Interrupted, it keeps what is finished.

    Parameters
    ----------
    archs : str or iterable of str
        Targets such as ``sm_90a``, or ``sm_80,sm_90a``; ``native`` is those of the visible GPUs.
    families : iterable of str
        Kernel families; all of them if None.
    heads, kv_heads, q_len : int or iterable of int
        Of the calls to come: only the tiles that they take are compiled. ``q_len`` is 1 if None,
        and without ``kv_heads`` all tiles of grouped-query attention are.
    jobs : int
        Kernels compiled at the same time; the number of usable CPUs if None.
    dry_run : bool
        Whether to look only: nothing is compiled, loaded or created.
    load : bool
        Whether to load them on the visible GPUs too, so that CUDA graphs can capture the calls.
    on_event : callable
        Called in this thread with each :class:`PrewarmEvent`.
    **wanted : str or int, or iterable of them
        The values to keep of ``dtype``, ``kv_lora_rank``, ``head_dim``, ``page_size``, or any other
        ingredient of a spec; a kernel that does not know it is kept. Unsaid, ``lookup``, ``values``
        and ``mask`` are ``paged``, ``shared`` and ``causal``.

    Returns
    -------
    PrewarmReport
        A unit for each kernel, and totals.

    Raises
    ------
    ArgumentError
        If an argument breaks its rule, or names an arch, family or value that does not exist.
    UnsupportedError
        If ``native`` or ``load`` finds no GPU to serve.
    ToolchainError
        If no NVRTC is installed.
    CacheError
        If something is to be compiled and the cache cannot be written, and without ``load``.
    DriverError
        If the driver refuses to load a kernel.
    """
    start = time.perf_counter()
    if jobs is not None and jobs < 1:
        raise ArgumentError(f"jobs: expected 1 or more, got {jobs}")
    shape = {"heads": heads, "kv_heads": kv_heads, "q_len": q_len}
    specs = select_specs(_archs(archs), families=families, wanted=wanted, **shape)
    devices = _devices_for(specs) if load else {}
    finished: dict[KernelSpec, PrewarmUnit] = {}
    loaded = 0
    if dry_run:
        happenings: Generator[Happening, None, None] = _look_up_all(specs)
    else:
        jobs = jobs or len(os.sched_getaffinity(0))  # may be fewer than os.cpu_count()
        happenings = _prewarm_all(specs, jobs, devices, finished)
    with closing(happenings):  # or an exception in the callback would leave threads at work
        for kind, spec, unit in happenings:
            loaded += kind == "loaded"
            if unit is not None:
                finished[spec] = unit
            if on_event is not None:
                done, total = len(finished), len(specs)
                on_event(PrewarmEvent(kind=kind, spec=spec, unit=unit, done=done, total=total))
    units = tuple(finished[spec] for spec in specs)
    ms = (time.perf_counter() - start) * 1e3
    return PrewarmReport(units=units, loaded=loaded, ms=round(ms, 1))


def visible_archs() -> dict[int, Arch]:
    """Return the targets of the visible GPUs by their index; a GPU that none serves is left out."""
    archs = {}
    for facts in visible_devices():
        with suppress(ArgumentError):
            archs[facts.index] = arch_of_capability(facts.major, facts.minor)
    return archs


def _archs(archs: str | Iterable[str]) -> list[Arch]:
    names = archs.split(",") if isinstance(archs, str) else archs
    found: dict[Arch, None] = {}
    for name in names:
        if name != "native":
            found[parse_arch(name)] = None
        elif native := visible_archs():
            found.update(dict.fromkeys(native.values()))
        else:
            got = ", ".join(f"{gpu.name} ({gpu.major}.{gpu.minor})" for gpu in visible_devices())
            raise UnsupportedError(
                f"arch: expected a supported GPU for native, got {got or 'none'}; "
                f"name targets instead, such as sm_90a"
            )
    return list(found)


def _devices_for(specs: Sequence[KernelSpec]) -> dict[int, Arch]:
    visible = visible_archs()
    archs = {spec.arch for spec in specs}
    devices = {index: arch for index, arch in visible.items() if arch in archs}
    if not devices:
        asked = ", ".join(map(str, sorted(archs)))
        got = ", ".join(map(str, sorted(set(visible.values())))) or "none"
        raise UnsupportedError(f"load: expected a visible GPU for {asked}, got {got}")
    return devices


def _prewarm_all(
    specs: Sequence[KernelSpec],
    jobs: int,
    devices: dict[int, Arch],
    finished: dict[KernelSpec, PrewarmUnit],
) -> Generator[Happening, None, None]:
    missing = []
    for kind, spec, unit in _look_up_all(specs):
        if unit.status == "missing":
            missing.append(spec)
        else:
            yield kind, spec, unit
    if missing and not devices:
        _require_writable_cache()
    yield from _build_all(missing, jobs, may_stay_in_memory=bool(devices))
    for spec in specs:
        for device, arch in devices.items():
            if spec.arch == arch and finished[spec].error is None:
                kernel_for(spec, device)
                yield "loaded", spec, None


def _look_up_all(
    specs: Sequence[KernelSpec],
) -> Generator[tuple[str, KernelSpec, PrewarmUnit], None, None]:
    for spec in specs:
        start = time.perf_counter()
        key = key_of(spec)
        entry = kernel_store().find(key)
        yield "finished", spec, _unit(spec, key, "hit" if entry else "missing", start, entry=entry)


def _build_all(
    specs: Sequence[KernelSpec], jobs: int, *, may_stay_in_memory: bool
) -> Generator[Happening, None, None]:
    """Yield each start and each end, in the order in which they happen."""
    happened: SimpleQueue[KernelSpec | Future[PrewarmUnit]] = SimpleQueue()

    def build(spec: KernelSpec) -> PrewarmUnit:
        happened.put(spec)
        return _build(spec, may_stay_in_memory=may_stay_in_memory)

    pool = ThreadPoolExecutor(jobs, thread_name_prefix="mlagen-prewarm")
    try:
        for spec in specs:
            pool.submit(build, spec).add_done_callback(happened.put)
        left = len(specs)
        while left:
            it = happened.get()
            if isinstance(it, Future):
                unit = it.result()
                left -= 1
                yield "finished", unit.spec, unit
            else:
                yield "started", it, None
    finally:
        # Also after Ctrl-C: what is being compiled is finished, what waits is dropped.
        pool.shutdown(cancel_futures=True)


def _build(spec: KernelSpec, *, may_stay_in_memory: bool) -> PrewarmUnit:
    start = time.perf_counter()
    key = key_of(spec)
    try:
        outcome = find_or_build(spec, created_by="prewarm")
        if outcome.entry.path is None and not may_stay_in_memory:
            path = current_settings().cache_dir
            raise CacheError(f"cache: expected an entry on the disk, got none: {path}", path=path)
    except MlagenError as error:
        return _unit(spec, key, "failed", start, error=error)
    return _unit(spec, key, "built" if outcome.built else "hit", start, entry=outcome.entry)


def _unit(
    spec: KernelSpec,
    key: CacheKey,
    status: str,
    start: float,
    *,
    entry: CacheEntry | None = None,
    error: MlagenError | None = None,
) -> PrewarmUnit:
    facts: dict[str, Any] = {}
    if entry:
        resources = entry.manifest.facts["resources"]
        facts = {
            "registers": max(kernel["registers"] for kernel in resources),
            "spill_bytes": sum(k["spill_store_bytes"] + k["spill_load_bytes"] for k in resources),
            "cubin_bytes": len(entry.cubin),
        }
    return PrewarmUnit(
        spec=spec,
        key=key.digest,
        toolchain=entry.manifest.toolchain if entry else key.toolchain,
        status=status,
        ms=round((time.perf_counter() - start) * 1e3, 3),
        error=error,
        **facts,
    )


def _require_writable_cache() -> None:
    path = current_settings().cache_dir
    try:
        require_writable(Layout(path))
    except OSError as error:
        message = f"cache: expected a writable folder, got {error.strerror or error}: {path}"
        raise CacheError(message, path=path) from error
