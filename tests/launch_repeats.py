"""Repeated launches and kernels with random delays, which expose races as bit differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mlagen.artifacts import Source
from mlagen.codegen.render import render
from mlagen.compiler.nvrtc import compile_source
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.runtime import loader, semaphores
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla.sm90 import SEMAPHORE_BYTES

# Word index of the first work item's sequence in the scheduler metadata.
SEQ_WORD = 20

_DELAY = "  if ((static_cast<u32>(clock64()) * 2654435761u >> 13) % 16 == 0) __nanosleep({});\n"

_WAIT = "  mbarrier_wait(shared_address(&barrier), phase);\n"

# Places where warps wait, and the max sleep before each, in nanoseconds.
MLA_DELAYS = {
    _WAIT: 2000,
    "  named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);\n": 5000,
}
GQA_DELAYS = {
    _WAIT: 2000,
    "      named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);": 5000,
    "        combine_partials<CombineSmem>(params, work_pipeline": 20_000,
    "    if (work_idx > 0) smem.work_pipeline.wait_empty(work_idx);\n": 5000,
    "    work_pipeline.wait_full(work_idx + 1);\n": 2000,
    "  store_warp_partial<CombineSmem>(0, 0, warp, softmax, output, smem);\n": 5000,
    "  named_barrier_sync(NamedBarrier::FirstWorkReady, kThreads);\n": 5000,
    "    named_barrier_sync(NamedBarrier::FirstWorkChecked, kThreads);\n": 5000,
}


def mismatches(compute: Callable[[], torch.Tensor], repeats: int) -> int:
    """Return the repetitions that differ from the first in any bit, for 16-bit outputs."""
    first = compute().clone()
    count = torch.zeros((), dtype=torch.int64, device=first.device)
    for _ in range(repeats):
        count += (compute().view(torch.int16) != first.view(torch.int16)).any()
    return int(count)


def nonzero_semaphore_bytes() -> int:
    """Return the number of nonzero bytes in the memory that every launch must zero."""
    count = 0
    for slab in semaphores._slabs:
        regions = slab.view(semaphores._REGIONS, -1)
        misses = regions[:, SEMAPHORE_BYTES + 4 :][:, :4]  # SchedMetaCache::arrivals
        count += int(regions[:, :SEMAPHORE_BYTES].count_nonzero() + misses.count_nonzero())
    return count


def with_delays(
    spec: KernelSpec, nanoseconds: Mapping[str, int], *, after: str = ""
) -> loader.LoadedKernel:
    """Return the kernel of :func:`delayed_source`, loaded on the first GPU."""
    source = delayed_source(spec, nanoseconds, after=after)
    return loader.load(compile_source(source, spec.arch, find_nvrtc()).code, spec, 0)


def delayed_source(spec: KernelSpec, nanoseconds: Mapping[str, int], *, after: str = "") -> Source:
    """Return a kernel's source whose warps sleep at random before the given lines.

    ``after`` follows each delay.
    """
    text = render(spec).text
    for place, delay in nanoseconds.items():
        assert place in text, place
        text = text.replace(place, _DELAY.format(delay) + after + place)
    return Source(text=text, origins=())
