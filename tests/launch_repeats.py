"""Launches repeated on a GPU, and kernels with delays: races show as bits that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from mlagen.artifacts import Source
from mlagen.codegen.render import render
from mlagen.compiler.nvrtc import compile_source
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.runtime import loader, semaphores
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla_sm90 import SEMAPHORE_BYTES

_DELAYED_LAUNCHES = 10_000  # of one test, with delays

# Where the request of a block's first item is in what it begins with, in words.
REQUEST_WORD = 20

_DELAY = "  if ((static_cast<u32>(clock64()) * 2654435761u >> 13) % 16 == 0) __nanosleep({});\n"


def mismatches(compute: Callable[[], torch.Tensor], repeats: int) -> int:
    """Return in how many repetitions any bit differs from the first; elements have 16 bits."""
    first = compute().clone()
    count = torch.zeros((), dtype=torch.int64, device=first.device)
    for _ in range(repeats):
        count += (compute().view(torch.int16) != first.view(torch.int16)).any()
    return int(count)


def counters_left() -> int:
    """Return how many bytes are not zero of what every launch leaves as zeros."""
    count = 0
    for slab in semaphores._slabs:
        regions = slab.view(semaphores._REGIONS, -1)
        misses = regions[:, SEMAPHORE_BYTES + 4 :][:, :4]  # as KeptSpans in kept_spans.cuh
        count += int(regions[:, :SEMAPHORE_BYTES].count_nonzero() + misses.count_nonzero())
    return count


def delayed_launches(cases: Sequence[object]) -> int:
    """Return how often to launch each of ``cases`` with delays: all of them 10,000 times."""
    return -(-_DELAYED_LAUNCHES // len(cases))


def with_delays(
    spec: KernelSpec, nanoseconds: Mapping[str, int], *, after: str = ""
) -> loader.LoadedKernel:
    """Return the kernel of :func:`delayed_source`, loaded on the first GPU."""
    source = delayed_source(spec, nanoseconds, after=after)
    return loader.load(compile_source(source, spec.arch, find_nvrtc()).code, spec, 0)


def delayed_source(spec: KernelSpec, nanoseconds: Mapping[str, int], *, after: str = "") -> Source:
    """Return a kernel's source whose warps fall asleep by chance before some places of it.

    ``after`` is what follows each delay.
    """
    text = render(spec).text
    for place, delay in nanoseconds.items():
        assert place in text, place
        text = text.replace(place, _DELAY.format(delay) + after + place)
    return Source(text=text, origins=())
