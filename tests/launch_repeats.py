"""Launches repeated on a GPU, and kernels with delays: races show as bits that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from mlagen.artifacts import Source
from mlagen.codegen.render import render
from mlagen.compiler.nvrtc import compile_source
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.runtime import loader
from mlagen.spec.kernel import KernelSpec

_DELAYED_LAUNCHES = 10_000  # of one test, with delays

_DELAY = "  if ((static_cast<u32>(clock64()) * 2654435761u >> 13) % 16 == 0) __nanosleep({});\n"


def mismatches(compute: Callable[[], torch.Tensor], repeats: int) -> int:
    """Return in how many repetitions any bit differs from the first; elements have 16 bits."""
    first = compute().clone()
    count = torch.zeros((), dtype=torch.int64, device=first.device)
    for _ in range(repeats):
        count += (compute().view(torch.int16) != first.view(torch.int16)).any()
    return int(count)


def delayed_launches(cases: Sequence[object]) -> int:
    """Return how often to launch each of ``cases`` with delays: all of them 10,000 times."""
    return -(-_DELAYED_LAUNCHES // len(cases))


def with_delays(
    spec: KernelSpec, nanoseconds: Mapping[str, int], *, after: str = ""
) -> loader.LoadedKernel:
    """Return the kernel with warps that fall asleep by chance before some places of its source.

    ``after`` is what follows each delay.
    """
    text = render(spec).text
    for place, delay in nanoseconds.items():
        assert place in text
        text = text.replace(place, _DELAY.format(delay) + after + place)
    cubin = compile_source(Source(text=text, origins=()), spec.arch, find_nvrtc())
    return loader.load(cubin.code, spec, 0)
