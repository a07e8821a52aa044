"""What calls of every family share: parts of their forms, and how their splits are combined."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

import torch

from mlagen.api.arguments import INT32_MAX, require, require_whole_number
from mlagen.engine import kernel_for
from mlagen.errors import UnsupportedError
from mlagen.runtime.launch import Launch, launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.plan import Sm80Plan
from mlagen.spec.combine import CombineSpec
from mlagen.spec.kernel import KernelSpec, pack_scalars

_LINE_BYTES = 128  # of L2


@dataclass(frozen=True, kw_only=True)
class CombineCall:
    """How the splits of a call are combined."""

    kernel: LoadedKernel
    blocks: int
    layout: bytes  # the integers of the parameters
    lse_offset: int  # bytes in the scratch: the partial rows come first, then their LSE

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
        """Enqueue the kernel; of pointers 0 is none."""
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
            self.layout,
            bmm2_scale,
            output_factor,
            lse_factor,
        )


def combine_call(
    spec: CombineSpec, plan: Sm80Plan, *, tokens: int, heads: int, device: int
) -> CombineCall | None:
    """Return how the splits of ``plan`` are combined on GPU ``device``; None if there is one."""
    if plan.splits == 1:
        return None
    return CombineCall(
        kernel=kernel_for(spec, device),
        blocks=tokens * heads * spec.slices,
        layout=pack_scalars(
            spec, {"total_rows": tokens * heads, "heads": heads, "num_splits": plan.splits}
        ),
        lse_offset=plan.partial_rows * spec.head_dim_vo * 4,
    )


def require_gpu(device: torch.device, query: str) -> int:
    """Return the index of the GPU; a device that is neither that nor the CPU is rejected.

    Raises
    ------
    UnsupportedError
        If it is.
    """
    if device.type != "cuda":
        raise UnsupportedError(f"{query}.device: expected cuda or cpu, got {device}")
    index: int = device.index
    return index


def scratch_offset(workspace: torch.Tensor, argument: str, needed: int) -> int:
    """Return where the ``needed`` bytes that a call uses begin in its workspace.

    They are its last ones, so that the front of a large workspace keeps its bytes: callers share
    one buffer with FlashInfer, whose counters lie in front and stay zero.

    Raises
    ------
    ArgumentError
        If it has fewer; the message has both sizes.
    """
    given = workspace.numel() * workspace.element_size()
    rule = f"{needed} bytes or more for this call"
    require(given >= needed, argument, rule, f"{given} bytes")
    # Whole lines from the beginning, whose alignment is checked; the end may be anywhere.
    return (given - needed) // _LINE_BYTES * _LINE_BYTES


def tensor_signature(value: object) -> Hashable:
    """Return what a check may depend on: the form of a tensor, else the type."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.get_device()
    return type(value).__name__


def scale_of(scale: float | torch.Tensor) -> tuple[int, float]:
    """Return a pointer and a value, of which the kernel takes the pointer if there is one."""
    if scale.__class__ is not float and isinstance(scale, torch.Tensor):
        return scale.data_ptr(), 0.0
    return 0, scale


@lru_cache(maxsize=1 << 14)
def rounded_up(length: int) -> int:
    """Return the next number of four leading bits.

    Plans are made for such lengths, so that the plan of a growing batch changes now and then and
    not at every step.
    """
    if length < 16:
        return length
    step = 1 << (length.bit_length() - 4)
    up = -(-length // step) * step
    return min(up, INT32_MAX) if length <= INT32_MAX else up  # what is longer is rejected


def length_signature(length: object) -> Hashable:
    """Return what a length that is no plain int is remembered by.

    Raises
    ------
    ArgumentError
        If it is no whole number; a tensor is not read.
    """
    return rounded_up(require_whole_number(length, "max_seq_len", least=0)), type(length)
