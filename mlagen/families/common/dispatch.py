"""Dispatch of decode calls: replayed, or launched, or validated and planned first."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from mlagen.errors import UnsupportedError
from mlagen.families.common.call_cache import (
    CallCache,
    GuardedEntry,
    Replay,
    Tensors,
    pointers_of,
)
from mlagen.families.common.call_key import CallKey, factors_of
from mlagen.families.common.choice_log import is_logged, log_choice, log_declined
from mlagen.families.common.launchers import Launcher, require_gpu, rounded_up
from mlagen.families.common.memory import CallArgs, check_memory
from mlagen.families.common.no_backward import record_output, record_write, tensors_of, wants_grad
from mlagen.families.common.outputs import (
    NOTHING,
    Computed,
    getter_of,
    new_outputs,
    output_specs,
    stored,
)
from mlagen.families.common.problem import Problem, ProblemShape
from mlagen.families.common.tensor_guard import is_nested
from mlagen.runtime import partition
from mlagen.runtime.partition import WHOLE_GPU, TooManyCtasError, partition_of, record_rejection
from mlagen.settings import Settings, current_settings

ResultT = TypeVar("ResultT")

_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_pointer_of = torch.Tensor.data_ptr


class _Missed(threading.local):
    """The key of the entry point that this thread runs, until its call is dispatched."""

    key: CallKey | None = None


_missed = _Missed()


def call_missed(
    key: CallKey | None, function: Callable[..., ResultT], *args: Any, **kwargs: Any
) -> ResultT:
    """Call a function that ends in a dispatch, whose launches are cached under ``key``."""
    outer, _missed.key = _missed.key, key
    try:
        return function(*args, **kwargs)
    finally:
        _missed.key = outer


ArgsT = TypeVar("ArgsT", bound=CallArgs)
ProblemT = TypeVar("ProblemT", bound=Problem)


@dataclass(kw_only=True, eq=False)
class DecodeCalls(Generic[ArgsT, ProblemT]):
    """The calls of a family, from all of its entry points, by their steps."""

    canonical: Callable[[ArgsT], ArgsT]  # with built-in Python numbers
    signature_of: Callable[[ArgsT], Hashable]  # all that a check or a plan may depend on
    validate: Callable[[ArgsT], ProblemT]
    check_contents: Callable[[ArgsT, ProblemT], None]  # with MLAGEN_CHECK=1
    shape_of: Callable[[ArgsT, ProblemT], ProblemShape]  # that the plan depends on
    kernel_of: Callable[[Settings], str]  # the kernel that the settings force, or auto
    make_sm90_launcher: Callable[[ArgsT, ProblemT, Settings, int], Launcher]
    make_sm80_launcher: Callable[[ArgsT, ProblemT, int], Launcher]
    compute: Callable[[ArgsT, ProblemT], Tensors]  # on the CPU: all outputs, in any shape
    cache: CallCache[Launcher] = field(default_factory=CallCache)

    def replay(
        self,
        values: tuple[Any, ...],
        length: int,
        tensors: Tensors,
        given: tuple[torch.Tensor | None, ...],
    ) -> Tensors | None:
        """Launch the call of a key as before, and return its outputs; None if it is another."""
        cache, settings = self.cache, current_settings()
        if cache.settings is not settings:
            cache.clear(settings)
        try:
            sms = partition_of(tensors[0]) if partition.partitioned_gpus else WHOLE_GPU
            launch_key = (*values, rounded_up(length), sms, *map(_pointer_of, tensors))
            replay = cache.replays.get(launch_key)
            if replay is None:
                return None
            # An attribute of a named tuple costs more than all of them.
            guard, outputs_of, computed_of, launches, enable_pdl = replay
            if any(map(is_nested, tensors)) or not guard(*tensors):
                return None
        except Exception:  # noqa: BLE001 - no tensor, or any kind without an address: checked later
            return None
        outputs = outputs_of(given)
        if launches is None:
            computed = computed_of(*tensors)  # in memory until the launches are enqueued
            replay = cache.replays.get((launch_key, pointers_of((*outputs, *computed))))
            if replay is None:
                return None
            launches = replay.launches or ()
        try:
            for launch in launches:
                launch.enqueue(enable_pdl)
        except TooManyCtasError as error:
            record_rejection(error)
            return None
        return outputs

    def dispatch(
        self,
        args: ArgsT,
        enable_pdl: bool,
        out: torch.Tensor | None = None,
        computed: Computed = NOTHING,
    ) -> Tensors:
        """Compute a call, and return its requested outputs.

        The result is copied to ``out`` if it is given and ``args`` have another output, as kernels
        cannot write it. ``computed`` are the tensors of ``args`` that are none of the key. The
        launches are cached under the key of :func:`call_missed`.
        """
        key, _missed.key = _missed.key, None
        try:
            outputs = self.run(args, enable_pdl, key, computed, out)
        except TooManyCtasError as error:
            record_rejection(error)
            # Planned for the available SMs, or for the sm80 kernel.
            return call_missed(key, self.dispatch, args, enable_pdl, out, computed)
        if out is None or outputs[0] is out:
            return outputs
        if outputs[0].data_ptr() != out.data_ptr():
            out.copy_(outputs[0].view(out.shape))
        return (out, *outputs[1:])

    def run(
        self,
        args: ArgsT,
        enable_pdl: bool,
        key: CallKey | None = None,
        computed: Computed = NOTHING,
        copied_to: torch.Tensor | None = None,
    ) -> Tensors:
        """Compute a call by its launcher, or validate and plan it first.

        The caller copies the output to ``copied_to``, if it is given and another tensor.
        """
        guarded = None if key is None else _guarded_key(key)
        entry = None if guarded is None else self.cache.find(*guarded)
        if entry is not None and entry.types == tuple(map(type, args)):
            launcher: Launcher | None = entry.launcher
            signature = None
        else:
            entry, args = None, self.canonical(args)
            check_memory(args)
            if wants_grad(args):
                return self._run_with_grad(args, enable_pdl, copied_to)
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
            return stored(self.compute(args, problem), output_specs(args, problem))
        if guarded is not None and signature is not None:
            entry = self.cache.add(*guarded, signature, launcher, tuple(map(type, args)))
        return self.launch(launcher, args, enable_pdl, key, entry, computed)

    def plan(
        self, args: ArgsT, problem: ProblemT, settings: Settings, sms: int = WHOLE_GPU
    ) -> Launcher:
        """Choose the kernel for a context of ``sms`` SMs, and return its launcher."""
        require_gpu(problem.device, args.names.query)
        try:
            launcher = self.make_sm90_launcher(args, problem, settings, sms)
        except UnsupportedError as error:
            if self.kernel_of(settings) == "sm90":
                raise
            log_declined(error)
            launcher = self.make_sm80_launcher(args, problem, max(sms, WHOLE_GPU))
        if is_logged():
            shape = self.shape_of(args, problem)
            log_choice(launcher.decode.spec, launcher.plan, shape, args.max_seq_len)
        return launcher

    def _signature_of(self, args: ArgsT) -> Hashable:
        """Return the signature of a call in its context; None if it cannot be a key."""
        try:
            signature = (partition_of(args.query), self.signature_of(args))
            hash(signature)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return None  # a value of another type, such as a list, which a check rejects
        return signature

    def _run_with_grad(
        self, args: ArgsT, enable_pdl: bool, copied_to: torch.Tensor | None
    ) -> Tensors:
        """Compute a call with a tensor that requires grad: its outputs require grad too."""
        tensors, specs = tensors_of(args), output_specs(args, self.validate(args))
        for spec in specs:
            if spec.given is not None:
                record_write(spec.given, getattr(args.names, spec.name), tensors)
        given = [spec.given.data_ptr() for spec in specs if spec.given is not None]
        if copied_to is not None and copied_to.data_ptr() not in given:
            record_write(copied_to, args.names.out, tensors)
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
        key: CallKey | None = None,
        entry: GuardedEntry[Launcher] | None = None,
        computed: Computed = NOTHING,
    ) -> Tensors:
        """Launch a planned call, and cache its launches if it has a guarded entry."""
        problem = launcher.problem
        specs = output_specs(args, problem)
        outputs = new_outputs(tuple(spec.given for spec in specs), specs, problem.device)
        if launcher.plan.num_ctas == 0 or problem.tokens == 0:
            return outputs
        try:
            launches = launcher.launch(args, enable_pdl, *outputs)
        except (OverflowError, struct.error):  # a number exceeds 4 bytes; nothing was launched
            self.validate(args)
            raise
        if key is None or entry is None or current_settings().checks_contents:
            return outputs
        inputs = launcher.inputs_of(args)
        outputs_of = getter_of(key, inputs, specs, problem.device, computed)
        # Zeros of either sign compare equal, but kernels distinguish them.
        if outputs_of is not None and 0.0 not in [v for v in key[0] if v.__class__ is float]:
            values, length, tensors, _ = key
            sms = partition_of(tensors[0])
            launch_key = (*values, rounded_up(length), sms, *pointers_of(tensors))
            is_fixed = not computed.tensors and all(spec.given is not None for spec in specs)
            new = None if is_fixed else (*outputs, *computed.tensors)
            replay = Replay(entry.guard, outputs_of, computed.computed_of, launches, enable_pdl)
            self.cache.store_replay(launch_key, replay, new)
        return outputs


def _guarded_key(key: CallKey) -> tuple[Hashable, Tensors] | None:
    """Return everything but metadata that a signature depends on, and the tensors."""
    _, length, tensors, _ = key
    if not tensors or not _TENSORS.issuperset(map(type, tensors)):
        return None
    sms = partition_of(tensors[0])
    return (factors_of(key), rounded_up(length), sms, len(tensors)), tensors
