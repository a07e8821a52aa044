"""Launchers of calls and of their kernels, and what their signatures and scratch have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, TypeVar

import torch

from mlagen.engine import kernel_for
from mlagen.errors import UnsupportedError
from mlagen.families.common.arguments import INT32_MAX, require
from mlagen.families.common.problem import Problem
from mlagen.runtime.launch import Launch, launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.partition import WHOLE_GPU
from mlagen.runtime.semaphores import semaphores_of
from mlagen.spec.combine import CombineSpec
from mlagen.spec.kernel import KernelSpec, Parameter, pack_constants

LauncherT = TypeVar("LauncherT", bound="Launcher")
PlannedT = TypeVar("PlannedT", bound="tuple[Any, Any] | None")
ScaleT = TypeVar("ScaleT", float, "float | torch.Tensor")
Values = dict[str, Any]  # by kernel parameter

_LINE_BYTES = 128  # L2 cache line

# The parameters of both families that are addresses of arguments.
TENSORS = {
    "workspace": "workspace_buffer",
    "query": "query",
    "block_tables": "block_tables",
    "kv_indptr": "kv_indptr",
    "seq_lens": "seq_lens",
    "cu_seqlens_q": "cum_seq_lens_q",
    "bmm1_scale_tensor": "bmm1_scale",
    "bmm2_scale_tensor": "bmm2_scale",
    "sinks": "sinks",
}


@dataclass(frozen=True, kw_only=True)
class KernelLauncher:
    """Launcher of one kernel for one signature."""

    kernel: LoadedKernel
    num_ctas: int
    values_of: Callable[[Values], tuple[Any, ...]]  # in the order of the kernel

    @property
    def spec(self) -> KernelSpec:
        """What the kernel is specialized for."""
        return self.kernel.spec

    def launch(self, enable_pdl: bool, values: Values) -> Launch:
        """Enqueue the kernel."""
        return launch(self.kernel, self.num_ctas, enable_pdl, self.values_of(values))


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A validated call signature with loaded kernels and a launch plan.

    Calls of a signature have the same tensors at other addresses, and other numbers.
    """

    problem: Any  # of the family
    plan: Any  # of the family and the kernel
    decode: KernelLauncher
    combine: KernelLauncher | None
    values: Values  # that all calls share; 0 for the others, since a dict that grows costs more
    tensors: Sequence[tuple[str, int]]  # parameters, and the arguments whose addresses they are
    offsets: Sequence[tuple[str, str, int]]  # parameters, and their bytes from another one
    numbers: Sequence[tuple[str, int]]  # parameters, and the arguments that they are

    def complete(self, args: Any, values: Values) -> None:
        """Reject misaligned tensors, and add the tensor maps."""
        raise NotImplementedError

    def launch(
        self, args: Any, enable_pdl: bool, out: torch.Tensor, lse: torch.Tensor | None = None
    ) -> Sequence[Launch]:
        """Enqueue the kernels of one call with this signature."""
        values = self.values.copy()
        for name, index in self.tensors:
            values[name] = args[index].data_ptr()
        for name, base, offset in self.offsets:
            values[name] = values[base] + offset
        for name, index in self.numbers:
            values[name] = args[index]
        values["out"] = out.data_ptr()
        if lse is not None:
            values["lse"] = lse.data_ptr()
        self.complete(args, values)
        if "semaphores" in values:
            values["semaphores"] = semaphores_of(self.decode.kernel.device, values["workspace"])
        decode_launch = self.decode.launch(enable_pdl, values)
        if self.combine is None:
            return (decode_launch,)
        return decode_launch, self.combine.launch(enable_pdl, values)


def make_launcher(
    launcher: Callable[..., LauncherT],
    args: Any,
    problem: Problem,
    plan: Any,
    decode: KernelSpec,
    combine: CombineSpec | None = None,
    *,
    constants: Values,
    values: Values,
    tensors: Mapping[str, str],
    parts: Mapping[str, tuple[str, int]],
    numbers: Mapping[str, str],
    **maps: Any,
) -> LauncherT:
    """Return the launcher of ``decode``, and of ``combine`` if the plan has splits for it.

    ``tensors`` and ``numbers`` are arguments by parameter. A parameter of ``parts`` is at an offset
    in the tensor of another one, unless it has a tensor of its own.
    """
    workspace, name = args.workspace_buffer, args.names.workspace_buffer
    scratch = scratch_offset(workspace, name, plan.workspace_bytes)
    partial_rows = scratch + plan.partial_rows_offset
    given = {
        name: args._fields.index(argument)
        for name, argument in tensors.items()
        if isinstance(getattr(args, argument), torch.Tensor)
    }
    offsets = [
        *((name, *part) for name, part in parts.items() if name not in given and part[0] in given),
        ("partial_out", "workspace", scratch),
        ("partial_lse", "workspace", partial_rows),
        ("partial_states", "workspace", partial_rows),
    ]
    shared: Values = dict.fromkeys((*tensors, *(name for name, _, _ in offsets)), 0)
    for spec in [decode] if combine is None else [decode, combine]:
        shared |= dict.fromkeys(_names_of(spec), 0)
        shared[spec.symbol] = pack_constants(spec, {**constants, **vars(plan)})
    device, rows = problem.device.index, problem.tokens * problem.heads
    return launcher(
        problem=problem,
        plan=plan,
        decode=_kernel_launcher(decode, device, plan.num_ctas),
        combine=combine and _kernel_launcher(combine, device, rows * combine.slices),
        values=shared | values,
        tensors=list(given.items()),
        offsets=offsets,
        numbers=[
            (name, args._fields.index(argument))
            for name, argument in numbers.items()
            if f"{name}_tensor" not in given
        ],
        **maps,
    )


def _kernel_launcher(spec: KernelSpec, device: int, num_ctas: int) -> KernelLauncher:
    values_of = itemgetter(*_names_of(spec))
    return KernelLauncher(kernel=kernel_for(spec, device), num_ctas=num_ctas, values_of=values_of)


def _names_of(spec: KernelSpec) -> list[str]:
    """Return the names of what a launch packs: all maps, and under the symbol all constants."""
    return list(dict.fromkeys(_name_of(spec, field) for field in spec.parameters))


def _name_of(spec: KernelSpec, field: Parameter) -> str:
    if field.cuda_type == "TensorMap":
        return "maps"
    return spec.symbol if field.is_constant else field.name


def plan_within(workspace: torch.Tensor, sms: int, plan_on: Callable[[int], PlannedT]) -> PlannedT:
    """Return the plan of a call for a context of ``sms`` SMs.

    A workspace sized for the whole GPU must suffice: if the plan needs a larger one, it is that for
    the whole GPU.
    """
    planned = plan_on(sms)
    if planned is not None and planned[1].workspace_bytes > workspace.nbytes:
        return plan_on(WHOLE_GPU)
    return planned


def require_gpu(device: torch.device, query: str) -> None:
    """Reject other devices than GPUs.

    Raises
    ------
    UnsupportedError
        If ``device`` is no CUDA device.
    """
    if device.type != "cuda":
        raise UnsupportedError(f"{query}.device: expected cuda or cpu, got {device}")


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
