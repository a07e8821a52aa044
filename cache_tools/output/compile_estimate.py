"""Rough compile times: what a prewarm announces, and what its remaining time is weighted by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlagen.spec.kernel import KernelSpec

# Seconds of a CPU core per kernel (x86_64, NVRTC 13.5, 2026-11).
SECONDS = {
    "mla_sm80": 0.6,
    "mla_sm90": 2.0,
    "mla_sm90_fp8": 1.1,
    "mla_sm90_fp8kv": 1.4,
    "gqa_sm80": 0.7,
    "gqa_sm90": 0.9,
    "combine": 0.1,
    "combine_states": 0.1,
}


def compile_seconds(specs: Iterable[KernelSpec]) -> float:
    """Return the estimated time to compile these kernels on one core."""
    return sum(SECONDS[spec.family] for spec in specs)


def prewarm_seconds(specs: Sequence[KernelSpec], jobs: int | None) -> float:
    """Return the estimated time to compile these kernels here and now, by at most ``jobs``."""
    from mlagen.prewarming.jobs import free_share, usable_cpus, usable_jobs

    parallel = min(jobs or usable_jobs(), usable_cpus(), len(specs))
    slowest = max(compile_seconds([spec]) for spec in specs)
    seconds = max(compile_seconds(specs) / parallel, slowest / min(parallel, 1))
    return seconds / free_share(parallel)


def about_text(seconds: float) -> str:
    """Return a rough duration, such as ``about 4 min``."""
    for length, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * length:
            return f"about {seconds / length:.0f} {unit}"
    return f"about {max(seconds, 1):.0f} s"
