"""Shared parts of the launchers: signatures, scratch, scales, and the combine kernel's launcher."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch

from mlagen.engine import kernel_for
from mlagen.errors import UnsupportedError
from mlagen.families.common.arguments import INT32_MAX, require
from mlagen.families.common.plan_sm80 import Sm80Plan
from mlagen.runtime.launch import Launch, launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.spec.combine import CombineSpec
from mlagen.spec.kernel import KernelSpec, pack_constants

ScaleT = TypeVar("ScaleT", float, "float | torch.Tensor")

_LINE_BYTES = 128  # L2 cache line


@dataclass(frozen=True, kw_only=True)
class CombineLauncher:
    """Launcher of the combine kernel for one signature."""

    kernel: LoadedKernel
    blocks: int
    packed_constants: bytes  # the constant kernel parameters
    lse_offset: int  # bytes in the scratch: partial O first, then the partial LSE

    @property
    def spec(self) -> KernelSpec:
        """What the kernel is specialised for."""
        return self.kernel.spec

    def launch(
        self,
        enable_pdl: bool,
        scratch: int,
        bmm2_tensor: int,
        sinks: int,
        out: int,
        lse: int,
        bmm2_scale: float,
        output_factor: float,
        lse_factor: float,
    ) -> Launch:
        """Enqueue the kernel; a pointer of 0 is absent."""
        return launch(
            self.kernel,
            self.blocks,
            enable_pdl,
            scratch,
            scratch + self.lse_offset,
            bmm2_tensor,
            sinks,
            out,
            lse,
            self.packed_constants,
            bmm2_scale,
            output_factor,
            lse_factor,
        )


def make_combine_launcher(
    spec: CombineSpec, plan: Sm80Plan, *, tokens: int, heads: int, device: int
) -> CombineLauncher | None:
    """Return the combine launcher of ``plan`` on GPU ``device``; None without split KV."""
    if plan.splits == 1:
        return None
    return CombineLauncher(
        kernel=kernel_for(spec, device),
        blocks=tokens * heads * spec.slices,
        packed_constants=pack_constants(
            spec, {"total_rows": tokens * heads, "heads": heads, "num_splits": plan.splits}
        ),
        lse_offset=plan.partial_rows * spec.head_dim_vo * 4,
    )


def require_gpu(device: torch.device, query: str) -> int:
    """Return the index of the GPU.

    Raises
    ------
    UnsupportedError
        If ``device`` is no CUDA device.
    """
    if device.type != "cuda":
        raise UnsupportedError(f"{query}.device: expected cuda or cpu, got {device}")
    index: int = device.index
    return index


def scratch_offset(workspace: torch.Tensor, argument: str, needed: int) -> int:
    """Return the offset of a call's ``needed`` scratch bytes in its workspace.

    The scratch is at the end: callers share one buffer with FlashInfer, whose semaphores are in
    front and must stay zero.

    Raises
    ------
    ArgumentError
        If the workspace is smaller; the message names both sizes.
    """
    given = workspace.numel() * workspace.element_size()
    rule = f"{needed} bytes or more for this call"
    require(given >= needed, argument, rule, f"{given} bytes")
    # Whole cache lines from the base address, whose alignment is checked; the end has none.
    return (given - needed) // _LINE_BYTES * _LINE_BYTES


def value_signature(value: object) -> Hashable:
    """Return all that a check or a plan may depend on: of a tensor, its metadata."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.get_device()
    return value, value.__class__  # the type too: a float or a bool may equal an int


def any_scale(scale: ScaleT) -> ScaleT:
    """Return a scale as a signature has it: calls of one signature differ in the number."""
    return 0.0 if isinstance(scale, float) else scale


def scale_of(scale: float | torch.Tensor) -> tuple[int, float]:
    """Return a scale's pointer and value; the kernel reads the pointer unless it is 0."""
    if scale.__class__ is not float and isinstance(scale, torch.Tensor):
        return scale.data_ptr(), 0.0
    return 0, scale


@lru_cache(maxsize=1 << 14)
def rounded_up(length: int) -> int:
    """Return ``length`` rounded up to four significant bits.

    Plans are made for rounded lengths, so a growing batch does not get a new plan at every step.
    """
    if length < 16:
        return length
    step = 1 << (length.bit_length() - 4)
    up = -(-length // step) * step
    return min(up, INT32_MAX) if length <= INT32_MAX else up  # longer ones are rejected
