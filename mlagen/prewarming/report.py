"""Prewarm report: events of a running prewarm, and its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlagen.cache.file import CacheEntry
from mlagen.cache.key import CacheKey
from mlagen.errors import MlagenError
from mlagen.spec.kernel import KernelSpec

STATUSES = ("hit", "built", "failed", "timeout", "skipped", "missing")


@dataclass(frozen=True, kw_only=True)
class PrewarmUnit:
    """Outcome of one kernel.

    Attributes
    ----------
    spec : KernelSpec
        The kernel; its ``str`` is what ``mlagen prewarm --kernel`` takes.
    key : str
        The digest of its key in the cache.
    toolchain : str
        The NVRTC that compiled it, or would.
    status : str
        ``hit``, ``built``, ``failed``, ``timeout``, or ``skipped`` after a failure with
        ``fail_fast``; in a dry run ``hit`` or ``missing``.
    ms : float
        Milliseconds that it took.
    reason : str
        Why the cache has no entry, if it is ``missing``, otherwise None.
    registers, spill_bytes, cubin_bytes : int
        Resources of the kernel; None if the cache has no entry.
    error : MlagenError
        Why it failed, or None.
    """

    spec: KernelSpec
    key: str
    toolchain: str
    status: str
    ms: float
    reason: str | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    cubin_bytes: int | None = None
    error: MlagenError | None = None


@dataclass(frozen=True, kw_only=True)
class PrewarmEvent:
    """Progress of a prewarm.

    Attributes
    ----------
    kind : str
        ``missing``, ``started`` (being compiled), ``finished`` or ``loaded``. Cached kernels finish
        and all others are missing before the first one starts.
    spec : KernelSpec
        The kernel.
    unit : PrewarmUnit
        The outcome of a finished kernel, otherwise None.
    done, total : int
        Number of finished kernels, and of all.
    """

    kind: str
    spec: KernelSpec
    unit: PrewarmUnit | None
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class PrewarmReport:
    """Result of a prewarm.

    Attributes
    ----------
    units : tuple[PrewarmUnit, ...]
        The outcome of each kernel, in the order of the specs.
    loaded : int
        Number of loaded kernels times GPUs.
    ms : float
        Milliseconds of the whole prewarm.
    left_out : tuple[str, ...]
        A sentence for each unsupported part of a model.
    """

    units: tuple[PrewarmUnit, ...]
    loaded: int
    ms: float
    left_out: tuple[str, ...] = ()

    def totals(self) -> dict[str, int | float]:
        """Return the number of units of each status, and the duration."""
        statuses = [unit.status for unit in self.units]
        counts = {name: statuses.count(name) for name in STATUSES}
        return {"units": len(statuses), **counts, "loaded": self.loaded, "ms": self.ms}


def unit_of(
    spec: KernelSpec,
    key: CacheKey,
    status: str,
    start: float,
    *,
    entry: CacheEntry | None = None,
    error: MlagenError | None = None,
    reason: str | None = None,
) -> PrewarmUnit:
    """Return the unit of a kernel whose work began at ``start``, by :func:`time.perf_counter`."""
    fields: dict[str, Any] = {}
    if entry:
        resources = entry.manifest.facts["resources"]
        fields = {
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
        reason=reason,
        error=error,
        **fields,
    )


class Progress:
    """Keeps what finished, and passes each event to the caller of a prewarm."""

    def __init__(self, on_event: Callable[[PrewarmEvent], None] | None, total: int) -> None:
        self._on_event = on_event
        self._total = total
        self.finished: dict[KernelSpec, PrewarmUnit] = {}
        self.loaded = 0

    def report(self, kind: str, spec: KernelSpec, unit: PrewarmUnit | None = None) -> None:
        """Take an event; ``unit`` is the outcome of a kernel that finished."""
        self.loaded += kind == "loaded"
        if unit is not None:
            self.finished[spec] = unit
        if self._on_event is not None:
            done, total = len(self.finished), self._total
            self._on_event(PrewarmEvent(kind=kind, spec=spec, unit=unit, done=done, total=total))
