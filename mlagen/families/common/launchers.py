"""Launchers: a valid call with loaded kernels, a launch plan and the sources of its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch

from mlagen.engine import kernel_for
from mlagen.errors import UnsupportedError
from mlagen.families.common.arguments import INT32_MAX, require
from mlagen.families.common.problem import LaunchPlan, Problem
from mlagen.runtime.launch import Launch, launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.partition import WHOLE_GPU
from mlagen.runtime.semaphores import semaphores_of
from mlagen.spec.combine import combine_spec
from mlagen.spec.gqa.variant import GqaSpec
from mlagen.spec.kernel import PARAMETER_NAMES
from mlagen.spec.mla.variant import MlaKernelSpec

LauncherT = TypeVar("LauncherT", bound="Launcher")
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")
PlannedT = TypeVar("PlannedT", bound="tuple[Any, Any] | None")

_LINE_BYTES = 128  # L2 cache line


Tensors = tuple[torch.Tensor, ...]

# Factors that convert a base-2 LSE to the requested base.
LSE_FACTORS = {"base2": 1.0, "basee": math.log(2)}


class OutputSpec(NamedTuple):
    """An output of a call, and the tensor that the caller gave for it."""

    name: str
    given: torch.Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype


class Computed(NamedTuple):
    """Tensors that an entry point computes for the kernels at every call."""

    tensors: Tensors
    computed_of: Callable[..., Tensors]  # compute them from the tensors of the key


_TENSORS = (torch.Tensor, Computed)


class Address(NamedTuple):
    """A kernel parameter that is the address of a tensor argument; null without it."""

    argument: str


class Part(NamedTuple):
    """A kernel parameter that is in the tensor of another one, unless it has one of its own."""

    whole: str
    offset: int  # bytes
    argument: str = ""


class Number(NamedTuple):
    """A kernel parameter that is a number of the call; unused if that is a tensor."""

    argument: str


class _Of(Enum):
    """What a kernel parameter is that the launch itself determines."""

    LAUNCH = 0


LAUNCH = _Of.LAUNCH

# What each parameter of the kernels is: an int or a float is the same for all calls of a launcher.
Source = Address | Part | Number | _Of | float
Sources = Mapping[str, Source]


def joined(*parts: Sources) -> dict[str, Source]:
    """Return the sources of all parts."""
    sources: dict[str, Source] = {}
    for part in parts:
        if twice := sources.keys() & part.keys():
            raise ValueError(f"{min(twice)}: expected one source of a kernel parameter, got two")
        sources |= part
    return sources


def named(facts: object, names: str) -> dict[str, Source]:
    """Return attributes of a plan or a problem as parameters of the same names."""
    return {name: getattr(facts, name) for name in names.split()}


@dataclass(kw_only=True, eq=False)
class Launcher:
    """A valid call with loaded kernels and a launch plan.

    Its calls have tensors of the same metadata at other addresses, and other numbers.
    """

    problem: Any  # of the family
    plan: LaunchPlan
    kernels: Sequence[tuple[LoadedKernel, int]]  # with their CTAs: decode, and combine if it splits
    constants: Mapping[str, Any]  # parameters that all calls share
    values: dict[
        str, Any
    ]  # the same as they are packed; 0 for the others, since a dict that grows costs more
    addresses: Sequence[tuple[str, int]]  # parameters, and the arguments whose addresses they are
    offsets: Sequence[tuple[str, str, int]]  # parameters, and their bytes from another one
    numbers: Sequence[tuple[str, int]]  # parameters, and the arguments that they are
    lengths: Sequence[int]  # arguments that affect the scheduling only

    @property
    def decode(self) -> LoadedKernel:
        """The kernel, besides that which combines its splits."""
        return self.kernels[0][0]

    def inputs_of(self, args: Any) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the kernels read."""
        return tuple([args[index] for _, index in self.addresses])

    def fixed_of(self, args: Any) -> tuple[Any, ...]:
        """Return what the arguments of all calls of this launcher share, besides tensors.

        A new argument is part of it, unless the kernels get it at each launch. Of a number, checks
        depend on whether it is 1.
        """
        facts = [None if isinstance(value, _TENSORS) else value for value in args]
        for _, index in self.numbers:
            facts[index] = facts[index] == 1.0
        for index in self.lengths:
            facts[index] = None
        return tuple(facts)

    def complete(self, args: Any, values: dict[str, Any]) -> None:
        """Reject misaligned tensors, and add the tensor maps."""
        raise NotImplementedError

    def launch(
        self, args: Any, out: torch.Tensor, lse: torch.Tensor | None = None
    ) -> Sequence[Launch]:
        """Enqueue the kernels of one call."""
        values = self.values.copy()
        for name, index in self.addresses:
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
            schedule_id = self.constants.get("schedule_id", 0)
            values["semaphores"] = semaphores_of(
                self.decode.device, values["workspace"], schedule_id
            )
        return [
            launch(kernel, num_ctas, args.enable_pdl, kernel.packing.values_of(values))
            for kernel, num_ctas in self.kernels
        ]


def make_launcher(
    launcher: Callable[..., LauncherT],
    args: Any,
    problem: Problem,
    plan: LaunchPlan,
    spec: MlaKernelSpec | GqaSpec,
    sources: Sources,
    **others: Any,
) -> LauncherT:
    """Return the launcher of ``spec``, and of the combine kernel if the plan has splits for it."""
    workspace, name = args.workspace_buffer, args.names.workspace_buffer
    scratch = scratch_offset(workspace, name, plan.workspace_bytes)
    kernels = [(kernel_for(spec, problem.device.index), plan.num_ctas)]
    if plan.num_splits > 1:
        combine = combine_spec(spec)
        num_ctas = problem.tokens * problem.heads * combine.slices
        kernels.append((kernel_for(combine, problem.device.index), num_ctas))
    states = "partial_lse" if plan.num_splits else "partial_states"
    sources = joined(
        sources,
        {
            "heads": problem.heads,
            "total_rows": problem.tokens * problem.heads,
            "partial_out": Part("workspace", scratch),
            states: Part("workspace", scratch + plan.partial_rows_offset),
            "row_splits": Part("workspace", scratch + plan.row_splits_offset),
            **dict.fromkeys(("out", "lse", "semaphores"), LAUNCH),
        },
    )
    wanted = {field.name for kernel, _ in kernels for field in kernel.spec.parameters}
    if unknown := sources.keys() - PARAMETER_NAMES:
        raise ValueError(f"{min(unknown)}: expected a parameter of a kernel, got another name")
    if missing := wanted - sources.keys():
        raise ValueError(f"{min(missing)}: expected a source of this kernel parameter, got none")
    fields = type(args)._fields
    addresses, offsets = _addresses(sources, args)
    constants = {name: value for name, value in sources.items() if isinstance(value, (int, float))}
    numbers = {
        name: source.argument
        for name, source in sources.items()
        if isinstance(source, Number)
        and name in wanted
        and not isinstance(getattr(args, source.argument), torch.Tensor)
    }
    values: dict[str, Any] = {
        name: 0 for name, source in sources.items() if isinstance(source, (Address, Part))
    }
    for kernel, _ in kernels:
        values |= {name: constants.get(name, 0) for name in kernel.packing.names}
    for kernel, _ in kernels:
        values[kernel.spec.symbol] = kernel.packing.pack_constants(constants)
    # A bias must cover the exact length.
    lengths = [] if getattr(args, "bias", None) is not None else ["max_seq_len"]
    return launcher(
        problem=problem,
        plan=plan,
        kernels=kernels,
        constants=constants,
        values=values,
        addresses=[(name, fields.index(argument)) for name, argument in addresses.items()],
        offsets=[offset for offset in offsets if offset[1] in addresses],
        numbers=[(name, fields.index(argument)) for name, argument in numbers.items()],
        lengths=[fields.index(name) for name in lengths],
        **others,
    )


def _addresses(sources: Sources, args: Any) -> tuple[dict[str, str], list[tuple[str, str, int]]]:
    """Return the arguments of parameters with tensors, and the parameters that are parts."""
    addresses, offsets = {"workspace": "workspace_buffer"}, []
    for name, source in sources.items():
        if isinstance(source, (Address, Part)):
            argument = source.argument
            if argument and isinstance(getattr(args, argument), torch.Tensor):
                addresses[name] = argument
            elif isinstance(source, Part):
                offsets.append((name, source.whole, source.offset))
    return addresses, offsets


def output_specs(args: Any, problem: Problem) -> list[OutputSpec]:
    """Return the requested outputs."""
    out = OutputSpec("out", args.out, problem.out_shape, problem.out_dtype)
    if not args.return_lse:
        return [out]
    return [out, OutputSpec("lse", args.lse, problem.lse_shape, torch.float32)]


def new_output(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized output."""
    return torch.empty(shape, dtype=dtype, device=device)


def stored(results: Tensors, specs: list[OutputSpec]) -> Tensors:
    """Return the requested results, in the outputs that the caller gave."""
    shaped = [(result.view(spec.shape), spec) for result, spec in zip(results, specs, strict=False)]
    return tuple([new if spec.given is None else spec.given.copy_(new) for new, spec in shaped])


def new_outputs(
    given: tuple[torch.Tensor | None, ...], specs: list[OutputSpec], device: torch.device
) -> Tensors:
    """Return the outputs of a call, with new ones for those that are None."""
    return tuple(
        [
            new_output(spec.shape, spec.dtype, device) if old is None else old
            for old, spec in zip(given, specs, strict=False)
        ]
    )


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
    """Reject other devices than GPUs."""
    if device.type != "cuda":
        raise UnsupportedError(f"{query}.device: expected cuda or cpu, got {device}")


class NotCoveredError(UnsupportedError):
    """No sm90 kernel serves such a call, whatever its batch."""


def scratch_offset(workspace: torch.Tensor, argument: str, needed: int) -> int:
    """Return the offset of a call's ``needed`` scratch bytes in its workspace.

    The scratch is at the end: callers share one buffer with FlashInfer, whose semaphores are in
    front and must stay zero.
    """
    given = workspace.numel() * workspace.element_size()
    rule = f"{needed} bytes or more for this call"
    require(given >= needed, argument, rule, f"{given} bytes")
    # Whole cache lines from the base address, whose alignment is checked; the end has none.
    return (given - needed) // _LINE_BYTES * _LINE_BYTES


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


def store_bounded(table: dict[KeyT, ValueT], key: KeyT, value: ValueT, max_entries: int) -> None:
    """Add an entry to a table that other threads use too; a full one drops its oldest entries.

    Not one at a time: the search of the first entry passes those that were dropped.
    """
    if len(table) >= max_entries and key not in table:
        for oldest in list(table)[: 1 + max_entries // 8]:
            table.pop(oldest, None)
    table[key] = value
