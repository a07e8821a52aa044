"""Launchers of calls, and what their signatures and scratch have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
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
from mlagen.spec.combine import combine_spec
from mlagen.spec.gqa.variant import GqaSpec
from mlagen.spec.mla.kernel import MlaKernelSpec

LauncherT = TypeVar("LauncherT", bound="Launcher")
PlannedT = TypeVar("PlannedT", bound="tuple[Any, Any] | None")
ScaleT = TypeVar("ScaleT", float, "float | torch.Tensor")
Values = dict[str, Any]  # by kernel parameter

_LINE_BYTES = 128  # L2 cache line


@dataclass(kw_only=True, eq=False)
class Launcher:
    """A validated call signature with loaded kernels and a launch plan.

    Calls of a signature have the same tensors at other addresses, and other numbers.
    """

    problem: Any  # of the family
    plan: Any  # of the family and the kernel
    kernels: Sequence[tuple[LoadedKernel, int]]  # with their CTAs: decode, and combine if it splits
    constants: Values
    values: Values  # that all calls share; 0 for the others, since a dict that grows costs more
    tensors: Sequence[tuple[str, int]]  # parameters, and the arguments whose addresses they are
    offsets: Sequence[tuple[str, str, int]]  # parameters, and their bytes from another one
    numbers: Sequence[tuple[str, int]]  # parameters, and the arguments that they are

    @property
    def decode(self) -> LoadedKernel:
        """The kernel, besides that which combines its splits."""
        return self.kernels[0][0]

    def inputs_of(self, args: Any) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the kernels read."""
        return tuple([args[index] for _, index in self.tensors])

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
            values["semaphores"] = semaphores_of(self.decode.device, values["workspace"])
        return [
            launch(kernel, num_ctas, enable_pdl, kernel.packing.values_of(values))
            for kernel, num_ctas in self.kernels
        ]


def make_launcher(
    launcher: Callable[..., LauncherT],
    args: Any,
    problem: Problem,
    plan: Any,
    spec: MlaKernelSpec | GqaSpec,
    *,
    constants: Values,
    values: Values,
    tensors: Mapping[str, int],
    parts: dict[str, tuple[str, int]],
    numbers: Mapping[str, int],
    **others: Any,
) -> LauncherT:
    """Return the launcher of ``spec``, and of the combine kernel if the plan has splits for it.

    ``tensors`` and ``numbers`` are the indices of arguments, by parameter. A parameter of ``parts``
    is at an offset in the tensor of another one, unless it has a tensor of its own.
    """
    workspace, name = args.workspace_buffer, args.names.workspace_buffer
    scratch = scratch_offset(workspace, name, plan.workspace_bytes)
    kernels = [(kernel_for(spec, problem.device.index), plan.num_ctas)]
    num_splits = getattr(plan, "num_splits", 0)  # 0: of a kernel that combines its splits itself
    if num_splits > 1:
        combine = combine_spec(spec)
        num_ctas = problem.tokens * problem.heads * combine.slices
        kernels.append((kernel_for(combine, problem.device.index), num_ctas))
    parts |= {
        "partial_out": ("workspace", scratch),
        "partial_lse" if num_splits else "partial_states": (
            "workspace",
            scratch + plan.partial_rows_offset,
        ),
    }
    given = {
        name: index for name, index in tensors.items() if isinstance(args[index], torch.Tensor)
    }
    constants = {
        **vars(problem),
        **problem.strides,
        "num_seqs": problem.batch,
        "total_rows": problem.tokens * problem.heads,
        **constants,
        **vars(plan),
    }
    names = chain(tensors, parts, *(kernel.packing.names for kernel, _ in kernels))
    shared: Values = dict.fromkeys(names, 0)
    for kernel, _ in kernels:
        shared[kernel.spec.symbol] = kernel.packing.pack_constants(constants)
    return launcher(
        problem=problem,
        plan=plan,
        kernels=kernels,
        constants=constants,
        values=shared | values,
        tensors=list(given.items()),
        offsets=[
            (name, *part) for name, part in parts.items() if name not in given and part[0] in given
        ],
        numbers=[number for number in numbers.items() if f"{number[0]}_tensor" not in given],
        **others,
    )


def indices_of(args_type: Any, same_names: str, **arguments: str) -> dict[str, int]:
    """Return the indices of the arguments whose addresses are kernel parameters, by parameter."""
    arguments |= {
        "workspace": "workspace_buffer",
        "cu_seqlens_q": "cum_seq_lens_q",
        "bmm1_scale_tensor": "bmm1_scale",
        "bmm2_scale_tensor": "bmm2_scale",
    }
    names = f"query block_tables kv_indptr seq_lens sinks {same_names}".split()
    arguments |= zip(names, names, strict=True)
    return {name: args_type._fields.index(argument) for name, argument in arguments.items()}


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
