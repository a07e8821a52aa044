"""`mlagen.prewarm`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from mlagen.cache.errors import rejections
from mlagen.cache.layout import Layout
from mlagen.cache.publish import require_writable
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.engine import kernel_for
from mlagen.errors import ToolchainError
from mlagen.prewarming.build import build_all, build_here, look_up_all
from mlagen.prewarming.events import Events
from mlagen.prewarming.gpus import devices_for
from mlagen.prewarming.isolation import workers
from mlagen.prewarming.jobs import usable_jobs
from mlagen.prewarming.report import Happening, PrewarmEvent, PrewarmReport, PrewarmUnit
from mlagen.prewarming.selection import selected_specs
from mlagen.settings import current_settings
from mlagen.spec.arch import Arch
from mlagen.spec.kernel import KernelSpec
from mlagen.values import (
    reject,
    require_callable,
    require_flag,
    require_number,
    require_whole_number,
    shown,
)

DEFAULT_TIMEOUT_S = 600.0


def prewarm(
    archs: str | Iterable[str] = "native",
    *,
    models: str | Iterable[str] | None = None,
    tp: int | Iterable[int] | None = None,
    kernels: str | KernelSpec | Iterable[str | KernelSpec] | None = None,
    families: Iterable[str] | None = None,
    heads: int | Iterable[int] | None = None,
    kv_heads: int | Iterable[int] | None = None,
    q_len: int | Iterable[int] | None = None,
    jobs: int | None = None,
    isolate: bool = False,
    timeout_s: float | None = None,
    fail_fast: bool = False,
    dry_run: bool = False,
    load: bool = False,
    on_event: Callable[[PrewarmEvent], None] | None = None,
    **wanted: str | int | Iterable[str | int],
) -> PrewarmReport:
    """Compile the kernels that the arguments name, unless the cache has them.

    Those of ``models``, those of ``kernels``, or without either every supported kernel that the
    other arguments leave. Needs a GPU for ``archs="native"`` and ``load`` only, and torch for
    ``load`` only. A kernel that does not compile is in the report and stops no other. Interrupted,
    it keeps what is finished.

    Parameters
    ----------
    archs : str or iterable of str
        Targets such as ``sm_90a`` or ``sm_80,sm_90a``, or cards such as ``H100``; ``native`` is
        those of the visible GPUs.
    models : str or iterable of str
        Names or Hub ids of models that mlagen knows, such as ``deepseek-v3``, or paths of the
        ``config.json`` of others or of its folder: the kernels that their calls take. Beside them
        ``dtype``, ``kv_dtype``, ``page_size``, ``lookup`` and ``q_len`` say how they are used.
        Defaults: the model's dtype for query and cache, and both query dtypes for an MLA cache in
        e4m3; pages of 64 tokens, of grouped-query attention 16 and 64; sparse and dense kernels for
        models with sparse attention. A pair of dtypes or a kind of layer without a kernel is left
        out, and named in the report; a model of which nothing is left is rejected.
    tp : int or iterable of int
        On how many GPUs the heads of the models are spread; 1 if None.
    kernels : str, KernelSpec or iterable of them
        Kernels by the text that a :class:`mlagen.MissError` and ``MLAGEN_RECORD`` have; ``archs``
        says nothing of them.
    families : iterable of str
        Kernel families; all of them if None.
    heads, kv_heads, q_len : int or iterable of int
        Of the calls to come: only the tiles that they take are compiled. ``q_len`` is 1 if None,
        and without ``kv_heads`` all tiles of grouped-query attention are.
    jobs : int
        Kernels compiled at the same time; one for each usable CPU if None, as far as memory goes.
    isolate : bool
        Whether to compile each kernel in a process of its own: if that dies or takes too long, the
        unit is ``failed`` or ``timeout``, and the others go on.
    timeout_s : float
        What such a process may take; 600 if None.
    fail_fast : bool
        Whether the first kernel that fails has all that have not begun ``skipped``.
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
        If an argument breaks its rule, or names an arch, model, family or value that does not
        exist, or no kernel serves a model.
    UnsupportedError
        If ``native`` or ``load`` finds no GPU to serve.
    ToolchainError
        If something is to be compiled and no NVRTC is installed; events have told what is missing.
    CacheError
        If something is to be compiled and the cache cannot be written, and without ``load``.
    DriverError
        If the driver rejects to load a kernel.
    """
    start = time.perf_counter()
    if jobs is not None:
        jobs = require_whole_number(jobs, "jobs", least=1)
    late: list[PrewarmUnit] = []
    how = _How(
        jobs=jobs or usable_jobs(),
        timeout_s=_timeout(timeout_s, isolate=require_flag(isolate, "isolate")),
        fail_fast=require_flag(fail_fast, "fail_fast"),
        late=late.append,
    )
    dry_run, load = require_flag(dry_run, "dry_run"), require_flag(load, "load")
    if on_event is not None:
        require_callable(on_event, "on_event")
    shape = {"heads": heads, "kv_heads": kv_heads, "q_len": q_len}
    left_out: dict[str, None] = {}
    specs = selected_specs(
        archs,
        models=models,
        tp=tp,
        kernels=kernels,
        families=families,
        wanted=wanted,
        on_left_out=left_out.setdefault,
        **shape,
    )
    devices = devices_for(specs) if load else {}
    events = Events(on_event, len(specs), late)
    happenings: Generator[Happening, None, None] = look_up_all(specs, is_dry=True)
    if not dry_run:
        happenings = _prewarm_all(specs, how, devices, events.finished)
    events.follow(happenings)
    units = tuple(events.finished[spec] for spec in specs)
    ms = (time.perf_counter() - start) * 1e3
    return PrewarmReport(
        units=units, loaded=events.loaded, ms=round(ms, 1), left_out=tuple(left_out)
    )


def _timeout(timeout_s: float | None, *, isolate: bool) -> float | None:
    """Return what a process for each kernel may take; None if there are none."""
    if timeout_s is None:
        return DEFAULT_TIMEOUT_S if isolate else None
    seconds = require_number(timeout_s, "timeout_s")
    if not isolate:
        reject("timeout_s", "isolate beside it", f"{shown(timeout_s)} alone")
    if not 0 < seconds < float("inf"):
        reject("timeout_s", "more than 0 seconds", shown(timeout_s))
    return min(seconds, threading.TIMEOUT_MAX)  # more than that is an error of Python's


@dataclass(frozen=True, kw_only=True)
class _How:
    """How kernels are built."""

    jobs: int
    timeout_s: float | None  # of a process for each kernel; None: in this process
    fail_fast: bool
    late: Callable[[PrewarmUnit], object]  # called with what is finished after an interrupt


def _prewarm_all(
    specs: Sequence[KernelSpec],
    how: _How,
    devices: dict[int, Arch],
    finished: dict[KernelSpec, PrewarmUnit],
) -> Generator[Happening, None, None]:
    missing: dict[KernelSpec, PrewarmUnit] = {}
    for kind, spec, unit in look_up_all(specs, is_dry=False):
        if unit.status == "missing":
            missing[spec] = unit
        else:
            yield kind, spec, unit
    if missing:
        try:
            find_nvrtc()  # without a compiler nothing begins
        except ToolchainError:
            yield from (("finished", spec, unit) for spec, unit in missing.items())
            raise
        yield from _build_missing(list(missing), how, may_stay_in_memory=bool(devices))
    for spec in specs:
        for device, arch in devices.items():
            if spec.arch == arch and finished[spec].status in {"hit", "built"}:
                kernel_for(spec, device)
                yield "loaded", spec, None


def _build_missing(
    missing: Sequence[KernelSpec], how: _How, *, may_stay_in_memory: bool
) -> Generator[Happening, None, None]:
    if how.timeout_s is None:
        if not may_stay_in_memory:
            _require_writable_cache()
        build = partial(build_here, may_stay_in_memory=may_stay_in_memory)
        yield from build_all(missing, how.jobs, build, fail_fast=how.fail_fast, late=how.late)
        return
    _require_writable_cache()  # nothing but the disk leads from one process to another
    with workers(how.timeout_s) as them:
        yield from build_all(
            missing,
            how.jobs,
            them.build,
            fail_fast=how.fail_fast,
            stop=them.stop,
            late=how.late,
        )


def _require_writable_cache() -> None:
    settings = current_settings()
    with rejections(settings.cache_dir, advises=True):
        require_writable(Layout(settings.cache_dir, settings.trusts_shared))
