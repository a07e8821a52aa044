"""What a prewarm tells while it runs, and what it came to."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, TypeAlias

from mlagen.cache.entry import CacheEntry
from mlagen.cache.key import CacheKey
from mlagen.errors import MlagenError
from mlagen.spec.kernel import KernelSpec

STATUSES = ("hit", "built", "failed", "timeout", "skipped", "missing")


@dataclass(frozen=True, kw_only=True)
class PrewarmUnit:
    """One kernel, and what became of it; the facts of an entry are None where there is none.

    ``status`` is ``hit``, ``built``, ``failed``, ``timeout``, or ``skipped`` after a failure that
    ended the work; in a dry run it is ``hit`` or ``missing``.
    """

    spec: KernelSpec
    key: str
    toolchain: str
    status: str
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
    left_out: tuple[str, ...] = ()  # sentences: parts of models that no kernel serves

    def totals(self) -> dict[str, int | float]:
        """Return how many units there are of each status, and the time it took."""
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
) -> PrewarmUnit:
    """Return a unit of what began at ``start``, as :func:`time.perf_counter` says it."""
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
        ms=ms_since(start),
        error=error,
        **facts,
    )


def ms_since(start: float) -> float:
    """Return the milliseconds since ``start``, as :func:`time.perf_counter` says it."""
    return round((time.perf_counter() - start) * 1e3, 3)
