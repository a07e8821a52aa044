"""Dispatch of decode calls: replayed, or launched by a guarded launcher, or planned first.

A replay has the key and the addresses of an earlier call, and enqueues its packed launches. A call
with other addresses takes the launcher of a call with the same key, if its tensors pass a guard.
Any other call, and each one whose guard cannot be made, is validated and planned.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from mlagen.errors import UnsupportedError
from mlagen.families.common.choice_log import is_logged, log_choice, log_declined, reason_of
from mlagen.families.common.launchers import (
    Computed,
    Launcher,
    NotCoveredError,
    OutputSpec,
    Tensors,
    named,
    new_outputs,
    output_specs,
    plan_within,
    require_gpu,
    rounded_up,
    store_bounded,
    stored,
)
from mlagen.families.common.memory import check_memory
from mlagen.families.common.no_backward import record_output, record_write, tensors_of, wants_grad
from mlagen.families.common.plan_sm80 import plan_sm80_call
from mlagen.families.common.problem import ProblemShape
from mlagen.families.common.tensor_guard import Guard, is_nested, make_guard
from mlagen.runtime import partition
from mlagen.runtime.launch import Launch, records, report
from mlagen.runtime.partition import WHOLE_GPU, TooManyCtasError, partition_of, record_rejection
from mlagen.settings import Settings, current_settings

# Cached launches; a model has one for each layer.
_MAX_LAUNCHES = 4096

# Keys with launchers; a server sees a few for each batch size.
_MAX_KEYS = 8192

# Launchers of one key, whose tensors differ in strides or dtype only, or in the GPU.
_MAX_LAUNCHERS_PER_KEY = 4

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_pointer_of, _shape_of = torch.Tensor.data_ptr, attrgetter("shape")
_NOTHING = Computed((), lambda *_: ())

Given = tuple[torch.Tensor | None, ...]  # the outputs that the caller gave


class CallKey(NamedTuple):
    """Everything that a call depends on but the metadata and addresses of its tensors."""

    values: tuple[Any, ...]
    scales: int  # how many of the last values are scales: the kernels get them at each launch
    length: int  # affects the scheduling only; 0 without one
    tensors: Tensors


@dataclass(eq=False, kw_only=True)
class Family:
    """The steps of a call that depend on its family, with its arguments and its problem."""

    canonical_numbers: Callable[[Any], Any]  # arguments with built-in Python numbers
    check_problem: Callable[[Any], Any]
    check_contents: Callable[[Any, Any], None]  # of tensors, with MLAGEN_CHECK=1
    shape_of: Callable[[Any, Any], ProblemShape]  # what the plan depends on
    kernel_of: Callable[[Settings], str]  # that the settings force, or ``auto``
    # Of an sm90 kernel; UnsupportedError where none serves the call.
    sm90_launcher: Callable[[Any, Any, Settings, int], Launcher]
    launcher_of: Callable[..., Launcher]  # of a kernel and its plan
    compute: Callable[[Any, Any], Tensors]  # all outputs, in any shape, of a call on the CPU

    def validate(self, args: Any) -> tuple[Any, Any]:
        """Return the arguments with built-in Python numbers, and the problem."""
        args = self.canonical_numbers(args)
        check_memory(args)
        return args, self.check_problem(args)

    def sm80_launcher(self, args: Any, problem: Any, sms: int = WHOLE_GPU) -> Launcher:
        """Return the launcher of the sm80 kernel for calls like ``args`` on ``sms`` SMs."""
        call = (problem.device.index, problem.variant, self.shape_of(args, problem))
        spec, plan = plan_within(
            args.workspace_buffer, sms, lambda sms: plan_sm80_call(*call, sms=sms)
        )
        return self.launcher_of(args, problem, plan, spec, named(plan, "m_tiles num_splits"))


class _Guarded(NamedTuple):
    """A launcher, the guard of the tensors that it takes, and its other arguments."""

    guard: Guard
    launcher: Launcher
    fixed: tuple[Any, ...]


class _Replay(NamedTuple):
    """The launches of a call, and the guard of its tensors."""

    guard: Guard
    outputs_of: Callable[[Given], Tensors]  # given or new
    computed_of: Callable[..., Tensors]  # what the kernels read besides the tensors
    launches: Sequence[Launch] | None  # None: by the addresses of new outputs and computed tensors
    enable_pdl: bool


@dataclass(eq=False)
class Dispatcher:
    """The calls of a family, from all of its entry points, and what is cached of them."""

    family: Family

    def __post_init__(self) -> None:
        """Begin without cached calls."""
        self.clear()

    def clear(self, settings: Settings | None = None) -> None:
        """Drop what is cached; all of it is for one object of settings."""
        self._replays: dict[Hashable, _Replay] = {}
        self._guarded: dict[Hashable, tuple[_Guarded, ...]] = {}
        self._settings = settings

    def replay(
        self,
        settings: Settings,
        values: tuple[Any, ...],
        length: int,
        tensors: Tensors,
        given: Given,
    ) -> Tensors | None:
        """Launch the call of a key as before, and return its outputs; None if it is another."""
        if self._settings is not settings:
            self.clear(settings)
        replays = self._replays
        try:
            sms = partition_of(tensors[0]) if partition.partitioned_gpus else WHOLE_GPU
            launch_key = (*values, rounded_up(length), sms, *map(_pointer_of, tensors))
            replay = replays.get(launch_key)
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
            # In memory until the launches are enqueued.
            computed = computed_of(*tensors)
            replay = replays.get((launch_key, *map(_pointer_of, (*outputs, *computed))))
            if replay is None or replay.launches is None:
                return None
            launches = replay.launches
        try:
            for launch in launches:
                launch.enqueue(enable_pdl)
        except TooManyCtasError as error:
            record_rejection(error)
            return None
        if records:
            report([launch.kernel.spec for launch in launches])
        return outputs

    def dispatch(self, args: Any, key: CallKey | None, given: Given) -> Tensors:
        """Compute a call, and return its requested outputs.

        Its launches are cached under ``key``, if there is one. A result is copied to the output
        that the caller gave, if ``args`` have another one, since kernels cannot write it.
        """
        try:
            outputs = self.run(args, key, given)
        except TooManyCtasError as error:
            record_rejection(error)
            return self.dispatch(args, key, given)  # for the available SMs, or the sm80 kernel
        pairs = zip(given, outputs, strict=False)
        return tuple([new if old is None else _copied(old, new) for old, new in pairs])

    def run(self, args: Any, key: CallKey | None, given: Given) -> Tensors:
        """Compute a call by a guarded launcher, or validate and plan it first."""
        settings = current_settings()
        guarded_key = None if key is None else _guarded_key(key)
        entry = None
        if key is not None and guarded_key in self._guarded:
            entry = self._find(guarded_key, key.tensors, args)
        if entry is not None:
            problem = entry.launcher.problem
            if settings.checks_contents:
                self.family.check_contents(args, problem)
            return self.launch(entry.launcher, args, key, entry.guard, given)
        args, problem = self.family.validate(args)
        if wants_grad(args):
            return self._run_with_grad(args, problem, given)
        if settings.checks_contents:
            self.family.check_contents(args, problem)
        if problem.device.type == "cpu":
            return stored(self.family.compute(args, problem), output_specs(args, problem))
        launcher = self.plan(args, problem, settings, partition_of(args.query))
        guard = None
        if key is not None and guarded_key is not None:
            guard = make_guard(key.tensors)
            if guard is not None:
                others = self._guarded.get(guarded_key, ())[: _MAX_LAUNCHERS_PER_KEY - 1]
                entry = _Guarded(guard, launcher, launcher.fixed_of(args))
                store_bounded(self._guarded, guarded_key, (entry, *others), _MAX_KEYS)
        return self.launch(launcher, args, key, guard, given)

    def plan(self, args: Any, problem: Any, settings: Settings, sms: int = WHOLE_GPU) -> Launcher:
        """Choose the kernel for a context of ``sms`` SMs, and return its launcher.

        No batch may change the kernel of a batch-invariant call.
        """
        require_gpu(problem.device, args.names.query)
        try:
            launcher = self.family.sm90_launcher(args, problem, settings, sms)
        except UnsupportedError as error:
            if self.family.kernel_of(settings) == "sm90":
                raise
            if problem.variant.batch_invariant and not isinstance(error, NotCoveredError):
                why = reason_of(error)
                raise UnsupportedError(f"batch_invariant: another kernel, as {why}") from error
            log_declined(error)
            launcher = self.family.sm80_launcher(args, problem, max(sms, WHOLE_GPU))
        if is_logged():
            shape = self.family.shape_of(args, problem)
            log_choice(launcher.decode.spec, launcher.plan, shape, args.max_seq_len)
        return launcher

    def _find(self, key: Hashable, tensors: Tensors, args: Any) -> _Guarded | None:
        """Return the launcher of a key that takes the tensors and the other arguments, if any."""
        if _have_memory(tensors):
            for entry in self._guarded.get(key, ()):
                if entry.guard(*tensors) and entry.fixed == entry.launcher.fixed_of(args):
                    return entry
        return None

    def _run_with_grad(self, args: Any, problem: Any, given: Given) -> Tensors:
        """Compute a call with a tensor that requires grad: its outputs require grad too."""
        tensors, specs = tensors_of(args), output_specs(args, problem)
        for spec in specs:
            if spec.given is not None:
                record_write(spec.given, getattr(args.names, spec.name), tensors)
        written = [spec.given.data_ptr() for spec in specs if spec.given is not None]
        for name, old in zip(("out", "lse"), given, strict=False):
            if old is not None and old.data_ptr() not in written:
                record_write(old, getattr(args.names, name), tensors)
        with torch.no_grad():
            outputs = self.run(args, None, given)
        return tuple(
            record_output(output, tensors) if spec.given is None else output
            for output, spec in zip(outputs, specs, strict=True)
        )

    def launch(
        self,
        launcher: Launcher,
        args: Any,
        key: CallKey | None = None,
        guard: Guard | None = None,
        given: Given = (),
    ) -> Tensors:
        """Launch a planned call, and cache its launches if it has a guard."""
        problem = launcher.problem
        specs = output_specs(args, problem)
        outputs = new_outputs(tuple([spec.given for spec in specs]), specs, problem.device)
        if launcher.plan.num_ctas == 0 or problem.tokens == 0:
            return outputs
        try:
            launches = launcher.launch(args, *outputs)
        except (OverflowError, struct.error):  # a number exceeds 4 bytes; nothing was launched
            self.family.validate(args)
            raise
        if key is not None and guard is not None and not current_settings().checks_contents:
            self._store_replay(launcher, args, key, guard, given, specs, outputs, launches)
        return outputs

    def _store_replay(
        self,
        launcher: Launcher,
        args: Any,
        key: CallKey,
        guard: Guard,
        given: Given,
        specs: list[OutputSpec],
        outputs: Tensors,
        launches: Sequence[Launch],
    ) -> None:
        """Cache the launches of a call, if they read and write no memory but that of its key.

        Kernels may read a converted tensor, or write an output that is copied afterwards.
        """
        values, _, length, tensors = key
        computed: Computed = args.computed or _NOTHING
        new = [out for out, spec in zip(outputs, specs, strict=True) if spec.given is None]
        known = map(_pointer_of, (*tensors, *new, *computed.tensors))
        used = map(_pointer_of, (*launcher.inputs_of(args), *outputs))
        # The outputs that the caller gave are those that the kernels write.
        is_given = [
            (old is None) == (spec.given is None) for old, spec in zip(given, specs, strict=False)
        ]
        # Zeros of either sign compare equal, but kernels distinguish them.
        has_zero = 0.0 in [value for value in values if value.__class__ is float]
        if has_zero or not all(is_given) or not {*known}.issuperset(used):
            return
        sms = partition_of(tensors[0]) if partition.partitioned_gpus else WHOLE_GPU
        launch_key = (*values, rounded_up(length), sms, *map(_pointer_of, tensors))
        blank = [spec._replace(given=None) for spec in specs]
        outputs_of: Callable[[Given], Tensors] = itemgetter(slice(len(specs)))
        if new:
            outputs_of = partial(new_outputs, specs=blank, device=launcher.problem.device)
        replay = _Replay(guard, outputs_of, computed.computed_of, launches, args.enable_pdl)
        if new or computed is not _NOTHING:
            addresses = map(_pointer_of, (*outputs, *computed.tensors))
            store_bounded(self._replays, (launch_key, *addresses), replay, _MAX_LAUNCHES)
            replay = replay._replace(launches=None)
        store_bounded(self._replays, launch_key, replay, _MAX_LAUNCHES)


def _copied(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return a given output, with the result, which may be in it already."""
    if new is not old and new.data_ptr() != old.data_ptr():
        old.copy_(new.view(old.shape))
    return old


def _guarded_key(key: CallKey) -> Hashable | None:
    """Return the key with the shapes of its tensors, and of its scales only whether they are 1."""
    values, scales, length, tensors = key
    if not tensors or not _PLAIN.issuperset(map(type, tensors)) or any(map(is_nested, tensors)):
        return None
    fixed = len(values) - scales
    are_one = map((1.0).__eq__, values[fixed:])
    sms = partition_of(tensors[0]) if partition.partitioned_gpus else WHOLE_GPU
    return (*values[:fixed], *are_one, rounded_up(length), sms, *map(_shape_of, tensors))


def _have_memory(tensors: Tensors) -> bool:
    """Whether all tensors have storage, which a guard does not check; empty ones need none."""
    try:
        return all(map(_pointer_of, tensors)) or all(
            tensor.data_ptr() or not tensor.numel() for tensor in tensors
        )
    except Exception:  # noqa: BLE001 - any kind without an address, such as one of vmap
        return False
