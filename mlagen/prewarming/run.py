"""`mlagen.prewarm`: compiles and loads kernels ahead of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from mlagen.cache.store import kernel_store
from mlagen.compiler.process import DEFAULT_TIME_LIMIT_S, CompileProcesses
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.engine import kernel_for
from mlagen.errors import ToolchainError
from mlagen.prewarming.build import build_all, build_unit, look_up_all
from mlagen.prewarming.machine import devices_for, usable_jobs
from mlagen.prewarming.report import PrewarmEvent, PrewarmReport, PrewarmUnit, Progress
from mlagen.prewarming.selection import selected_specs
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


def prewarm(
    archs: str | Iterable[str] = "native",
    *,
    models: str | Iterable[str] | None = None,
    tp: int | Iterable[int] | None = None,
    dcp: int | Iterable[int] | None = None,
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
    """Compile the kernels that the arguments select, unless they are cached.

    The selection is the kernels of ``models`` and ``kernels``, or without either every supported
    kernel that matches the other arguments. Only ``archs="native"`` and ``load`` need a GPU, and
    only ``load`` needs torch. A kernel that fails to compile is in the report and does not stop the
    others. After an interrupt, finished kernels stay in the cache.

    Parameters
    ----------
    archs : str or iterable of str
        Targets such as ``sm_90a`` or ``sm_80,sm_90a``, or cards such as ``H100``; ``native``
        selects the visible GPUs.
    models : str or iterable of str
        Models whose kernels are compiled: names or Hub ids that mlagen knows, such as
        ``deepseek-v3``, or paths of a ``config.json`` or of its folder. ``dtype``, ``kv_dtype``,
        ``page_size``, ``lookup`` and ``q_len`` select how the models are served. Defaults: the
        model's dtype for Q and KV, and both BF16 and FP8 queries for an FP8 MLA cache; page size
        64 for MLA, 16 and 64 for GQA, 32 too if some layers have a recurrent state; sparse and
        dense kernels for models with sparse attention. A pair of dtypes or a kind of layer without
        a kernel is omitted and named in the report; a model without any kernel is rejected.
    tp : int or iterable of int
        Tensor-parallel size: the number of GPUs that share the heads; 1 if None.
    dcp : int or iterable of int
        Decode-context-parallel size of an MLA model, a divisor of ``tp``: the number of these GPUs
        that share the KV cache and gather their heads; 1 if None.
    kernels : str, KernelSpec or iterable of them
        Kernels by their text in a :class:`mlagen.MissError` or an ``MLAGEN_RECORD`` file; ``archs``
        does not apply to them.
    families : iterable of str
        Kernel families; all of them if None.
    heads, kv_heads, q_len : int or iterable of int
        Shape of the expected calls: only the tiles that they take are compiled. ``q_len`` is 1 if
        None; without ``kv_heads``, all tiles of grouped-query attention are compiled.
    jobs : int
        Kernels compiled in parallel; one per usable CPU, limited by memory, if None.
    isolate : bool
        Whether to compile each kernel in its own process: if it crashes or takes too long, the
        unit is ``failed`` or ``timeout``, and the others continue.
    timeout_s : float
        Time limit of such a process; 600 if None.
    fail_fast : bool
        Whether the first failure makes all kernels that have not started ``skipped``.
    dry_run : bool
        Whether to look up only: nothing is compiled, loaded or created.
    load : bool
        Whether to load the kernels on the visible GPUs too, so that CUDA graphs can capture the
        calls.
    on_event : callable
        Called in this thread with each :class:`PrewarmEvent`.
    **wanted : str or int, or iterable of them
        Values to select of ``dtype``, ``kv_lora_rank``, ``head_dim``, ``page_size``, or any other
        field of a spec; a kernel without that field is selected. Defaults of ``lookup``, ``values``
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
        If ``native`` or ``load`` finds no supported GPU.
    ToolchainError
        If a kernel must be compiled and no NVRTC is installed; events report the missing kernels
        first.
    CacheError
        If a kernel must be compiled and the cache cannot be written, without ``load``.
    DriverError
        If the driver rejects a kernel at load time.
    """
    start = time.perf_counter()
    if jobs is not None:
        jobs = require_whole_number(jobs, "jobs", min_value=1)
    build = partial(
        _build_missing,
        jobs=jobs or usable_jobs(),
        timeout_s=_timeout(timeout_s, isolate=require_flag(isolate, "isolate")),
        fail_fast=require_flag(fail_fast, "fail_fast"),
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
        dcp=dcp,
        kernels=kernels,
        families=families,
        wanted=wanted,
        on_left_out=left_out.setdefault,
        **shape,
    )
    devices = devices_for(specs) if load else {}
    progress = Progress(on_event, len(specs))
    if dry_run:
        for unit in look_up_all(specs, is_dry=True):
            progress.report("finished", unit.spec, unit)
    else:
        _prewarm_all(specs, build, devices, progress)
    units = tuple(progress.finished[spec] for spec in specs)
    ms = (time.perf_counter() - start) * 1e3
    return PrewarmReport(
        units=units, loaded=progress.loaded, ms=round(ms, 1), left_out=tuple(left_out)
    )


def _timeout(timeout_s: float | None, *, isolate: bool) -> float | None:
    """Return the time limit of each process; None without isolation."""
    if timeout_s is None:
        return DEFAULT_TIME_LIMIT_S if isolate else None
    seconds = require_number(timeout_s, "timeout_s")
    if not isolate:
        reject("timeout_s", "isolate beside it", f"{shown(timeout_s)} alone")
    if not 0 < seconds < float("inf"):
        reject("timeout_s", "more than 0 seconds", shown(timeout_s))
    return seconds


def _prewarm_all(
    specs: Sequence[KernelSpec],
    build: Callable[..., None],
    devices: dict[int, Arch],
    progress: Progress,
) -> None:
    missing = []
    for unit in look_up_all(specs, is_dry=False):
        if unit.status == "missing":
            missing.append(unit)
            progress.report("missing", unit.spec)
        else:
            progress.report("finished", unit.spec, unit)
    if missing:
        try:
            find_nvrtc()  # fail before the first build
        except ToolchainError:
            for unit in missing:
                progress.report("finished", unit.spec, unit)
            raise
        build(missing, progress, may_stay_in_memory=bool(devices))
    for spec in specs:
        for device, arch in devices.items():
            if spec.arch == arch and progress.finished[spec].status in {"hit", "built"}:
                kernel_for(spec, device)
                progress.report("loaded", spec)


def _build_missing(
    missing: Sequence[PrewarmUnit],
    progress: Progress,
    *,
    jobs: int,
    timeout_s: float | None,  # of the process of each kernel; None: in this process
    fail_fast: bool,
    may_stay_in_memory: bool,
) -> None:
    if not may_stay_in_memory:
        kernel_store().require_writable()
    processes = None if timeout_s is None else CompileProcesses(timeout_s)
    build_all(
        missing,
        jobs,
        partial(build_unit, processes=processes, may_stay_in_memory=may_stay_in_memory),
        progress,
        fail_fast=fail_fast,
        stop=processes.stop if processes else lambda: None,
    )
