"""Dispatch of decode calls: replayed, or launched, or validated and planned first."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from mlagen.families.common.call_cache import (
    CallCache,
    CallKey,
    GuardedEntry,
    Replay,
    Tensors,
)
from mlagen.families.common.entry_point import EntryPoint, Getter, getter
from mlagen.families.common.launchers import rounded_up
from mlagen.families.common.memory import CallArgs, check_memory
from mlagen.families.common.no_backward import record_output, record_write, tensors_of, wants_grad
from mlagen.runtime import partition
from mlagen.runtime.launch import Launch
from mlagen.runtime.partition import WHOLE_GPU, TooManyCtasError, partition_of, record_rejection
from mlagen.settings import Settings, current_settings

_pointer_of = torch.Tensor.data_ptr


class OutputSpec(NamedTuple):
    """An output of a call, and the tensor that the caller gave for it."""

    name: str
    given: torch.Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype


class Problem(Protocol):
    """The problem of a valid call."""

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""

    @property
    def tokens(self) -> int:
        """Query tokens of all requests."""


class Launcher(Protocol):
    """A validated call signature with loaded kernels and a launch plan."""

    @property
    def problem(self) -> Any:
        """The problem of the calls."""

    @property
    def plan(self) -> Any:
        """The launch plan, with ``num_ctas``."""

    @property
    def launch(self) -> Callable[..., Sequence[Launch]]:
        """Enqueue the kernels for arguments, ``enable_pdl`` and outputs."""


ArgsT = TypeVar("ArgsT", bound=CallArgs)
ProblemT = TypeVar("ProblemT", bound=Problem)


class _Call(NamedTuple, Generic[ArgsT]):
    """A call of an entry point, and its key; None if it has no guard."""

    entry_point: EntryPoint[ArgsT]
    given: tuple[Any, ...]
    key: CallKey | None


@dataclass(kw_only=True, eq=False)
class DecodeCalls(Generic[ArgsT, ProblemT]):
    """The calls of a family, from all of its entry points, by their steps."""

    settings_of: Callable[[Settings], Hashable]  # that a check or a plan depends on
    canonical: Callable[[ArgsT], ArgsT]  # with built-in Python numbers
    signature_of: Callable[[ArgsT], Hashable]  # all that a check or a plan may depend on
    validate: Callable[[ArgsT], ProblemT]
    check_contents: Callable[[ArgsT, ProblemT], None]  # with MLAGEN_CHECK=1
    plan: Callable[[ArgsT, ProblemT, Settings, int], Launcher]  # for a context of so many SMs
    outputs_of: Callable[[ArgsT, ProblemT], list[OutputSpec]]  # the requested ones
    compute: Callable[[ArgsT, ProblemT], Tensors]  # on the CPU: all outputs, in any shape
    cache: CallCache[Launcher] = field(default_factory=CallCache)

    def dispatch(self, entry_point: EntryPoint[ArgsT], given: tuple[Any, ...]) -> Tensors:
        """Compute a call, whose arguments are in the order of the entry point's parameters.

        Returns the requested outputs.
        """
        parts = entry_point.parts[tuple(map(type, given))]
        key = None
        try:
            if parts is not None:
                tensors = parts.tensors_of(given)
                values = (
                    parts,
                    self.settings_of(current_settings()),
                    partition_of(tensors[0]) if partition.partitioned_gpus else WHOLE_GPU,
                    None if parts.length is None else rounded_up(given[parts.length]),
                    parts.values_of(given),
                )
                pointers = tuple(map(_pointer_of, tensors))
                key = CallKey(values, parts.floats_of(given), pointers, tensors)
        except (IndexError, RuntimeError, TypeError):
            pass  # no tensor, or one without an address
        try:
            outputs = None if key is None else self.cache.replay(key, given)
            return outputs or self._run(_Call(entry_point, given, key))
        except TooManyCtasError as error:
            record_rejection(error)
        return self.dispatch(entry_point, given)  # planned for the available SMs, or for sm80

    def _run(self, call: _Call[ArgsT]) -> Tensors:
        """Compute a call that has no replay."""
        entry_point, given, _ = call
        args, enable_pdl = entry_point.args_of(dict(zip(entry_point.names, given, strict=True)))
        outputs = self.run(args, enable_pdl, call)
        out = given[entry_point.outputs[0]]
        if out is None or outputs[0] is out:
            return outputs
        if outputs[0].data_ptr() != out.data_ptr():  # the kernels cannot write it
            out.copy_(outputs[0].view(out.shape))
        return (out, *outputs[1:])

    def run(self, args: ArgsT, enable_pdl: bool, call: _Call[ArgsT] | None = None) -> Tensors:
        """Compute a call that has no replay; ``call`` is the one to cache."""
        key, signature = None if call is None else call.key, None
        entry = None if key is None else self.cache.find(key)
        if entry is not None and entry.types == tuple(map(type, args)):
            launcher: Launcher | None = entry.launcher
        else:
            entry, args = None, self.canonical(args)
            check_memory(args)
            if wants_grad(args):
                return self._run_with_grad(args, enable_pdl)
            signature = self._signature_of(args)
            launcher = self.cache.launchers.get(signature)
        problem = self.validate(args) if launcher is None else launcher.problem
        if launcher is None and problem.device.type != "cpu":
            launcher = self.plan(args, problem, current_settings(), partition_of(args.query))
            if signature is not None:
                self.cache.store(signature, launcher)
        if current_settings().checks_contents:
            self.check_contents(args, problem)
        if launcher is None:
            return _stored(self.compute(args, problem), self.outputs_of(args, problem))
        if key is not None and signature is not None:
            entry = self.cache.add(key, signature, tuple(map(type, args)))
        return self.launch(launcher, args, enable_pdl, call, entry)

    def _signature_of(self, args: ArgsT) -> Hashable:
        """Return the signature of a call with its settings; None if it cannot be a key."""
        settings = (self.settings_of(current_settings()), partition_of(args.query))
        try:
            signature = (settings, self.signature_of(args))
            hash(signature)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return None  # a value of another type, such as a list, which a check rejects
        return signature

    def _run_with_grad(self, args: ArgsT, enable_pdl: bool) -> Tensors:
        """Compute a call with a tensor that requires grad: its outputs require grad too."""
        tensors, specs = tensors_of(args), self.outputs_of(args, self.validate(args))
        for spec in specs:
            if spec.given is not None:
                record_write(spec.given, getattr(args.names, spec.name), tensors)
        with torch.no_grad():
            outputs = self.run(args, enable_pdl)
        return tuple(
            record_output(output, tensors) if spec.given is None else output
            for output, spec in zip(outputs, specs, strict=True)
        )

    def launch(
        self,
        launcher: Launcher,
        args: ArgsT,
        enable_pdl: bool,
        call: _Call[ArgsT] | None = None,
        entry: GuardedEntry[Launcher] | None = None,
    ) -> Tensors:
        """Launch a planned call, and cache its launches if it has a guarded entry."""
        problem = launcher.problem
        specs = self.outputs_of(args, problem)
        outputs = tuple(
            new_output(spec.shape, spec.dtype, problem.device) if spec.given is None else spec.given
            for spec in specs
        )
        if launcher.plan.num_ctas == 0 or problem.tokens == 0:
            return outputs
        try:
            launches = launcher.launch(args, enable_pdl, *outputs)
        except (OverflowError, struct.error):  # a number exceeds 4 bytes; nothing was launched
            self.validate(args)
            raise
        if call is None or call.key is None or entry is None:
            return outputs
        outputs_of = _outputs_of(call, args, specs, problem.device)
        if outputs_of is not None and not current_settings().checks_contents:
            new = None if all(spec.given is not None for spec in specs) else outputs
            replay = Replay(entry.guard, outputs_of, launches, enable_pdl)
            self.cache.store_replay(call.key, replay, new)
        return outputs


def new_output(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized output."""
    return torch.empty(shape, dtype=dtype, device=device)


def _stored(results: Tensors, specs: list[OutputSpec]) -> Tensors:
    """Return the requested results, in the outputs that the caller gave."""
    shaped = [(result.view(spec.shape), spec) for result, spec in zip(results, specs, strict=False)]
    return tuple(new if spec.given is None else spec.given.copy_(new) for new, spec in shaped)


def _outputs_of(
    call: _Call[Any], args: CallArgs, specs: list[OutputSpec], device: torch.device
) -> Getter | None:
    """Return a getter of the outputs of a replay from the arguments.

    None if the kernels read or write other memory than that of the arguments, such as a converted
    tensor, or an output that is copied afterwards.
    """
    entry_point, given, key = call
    pointers = () if key is None else key.pointers
    tensors = (value for value in args if isinstance(value, torch.Tensor))
    if not {tensor.data_ptr() for tensor in tensors} <= {*pointers}:
        return None
    places: list[int | OutputSpec] = []
    for spec, index in zip(specs, entry_point.outputs, strict=False):
        if (given[index] is None) != (spec.given is None):
            return None
        places.append(spec if spec.given is None else index)
    indices = [place for place in places if isinstance(place, int)]
    if len(indices) == len(specs):
        return getter(indices)
    return partial(_new_outputs, places, device)


def _new_outputs(
    places: list[int | OutputSpec], device: torch.device, given: tuple[Any, ...]
) -> Tensors:
    return tuple(
        given[place] if isinstance(place, int) else new_output(place.shape, place.dtype, device)
        for place in places
    )
