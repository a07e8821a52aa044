"""Two-level call cache of validated and planned calls.

Level 1, the fast path, keys on scalars and a tensor guard; with equal base addresses it replays the
packed launches. Level 2 keys on the full signature, which is everything that a check or a plan may
depend on, and reuses the validated plan. Building a signature costs much more than checking a
guard, hence level 1. A guard accepts real tensors only; a signature does not distinguish them from
fake ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from mlagen.families.common.tensor_guard import Guard, make_guard
from mlagen.runtime.launch import Launch

# Cached signatures and keys; a server sees a few for each batch size.
_MAX_CALLS = 8192

# A signature gets another guard if the current one rejects tensors with that signature, such as
# inference tensors, but not at every call: making a guard costs more than building a signature.
_MAX_GUARDS = 4

# Guarded entries tried for one key, such as two batches or two GPUs that alternate.
_MAX_ENTRIES_PER_KEY = 4

# Cached launches; a model has one for each layer.
_MAX_LAUNCHES = 4096

Tensors = tuple[torch.Tensor, ...]
LauncherT = TypeVar("LauncherT")
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")

_is_nested = attrgetter("is_nested")


class CallKey(NamedTuple):
    """The key of a call: with equal ones and tensors that pass one guard, signatures are equal."""

    values: Hashable
    floats: tuple[float, ...]
    pointers: tuple[int, ...]  # of the tensors
    tensors: Tensors

    @property
    def of_entries(self) -> Hashable:
        """Everything that a signature depends on except metadata; factors are 1 or are not."""
        return (self.values, len(self.tensors), *[number == 1.0 for number in self.floats])

    @property
    def has_memory(self) -> bool:
        """Whether all tensors have storage, which a guard does not check; empty ones need none."""
        pairs = zip(self.tensors, self.pointers, strict=True)
        return all(pointer or not tensor.numel() for tensor, pointer in pairs)


@dataclass(frozen=True, eq=False)
class GuardedEntry(Generic[LauncherT]):
    """A cached launcher and the guard that accepts its tensors."""

    launcher: LauncherT
    guard: Guard
    types: tuple[type, ...]  # of the family's arguments


@dataclass(eq=False)
class _GuardState(Generic[LauncherT]):
    """The guarded entry of one signature under one key."""

    entry: GuardedEntry[LauncherT] | None = None
    num_attempts: int = 0  # to make a guard


class Replay(NamedTuple):
    """The launches of a call, and the guard of its tensors."""

    guard: Guard
    outputs_of: Callable[[tuple[Any, ...]], Tensors]  # given or new, from the arguments
    launches: Sequence[Launch] | None  # None: by the addresses of new outputs
    enable_pdl: bool


class CallCache(Generic[LauncherT]):
    """Launchers by signature and by guarded key, and their launches by key and addresses."""

    def __init__(self) -> None:
        self.launchers: dict[Hashable, LauncherT] = {}
        self._guards: dict[Hashable, _GuardState[LauncherT]] = {}
        self._entries: dict[Hashable, tuple[GuardedEntry[LauncherT], ...]] = {}
        self._replays: dict[Hashable, Replay] = {}

    def clear(self) -> None:
        """Drop all entries of both levels."""
        for table in (self.launchers, self._guards, self._entries, self._replays):
            table.clear()

    def replay(self, key: CallKey, given: tuple[Any, ...]) -> Tensors | None:
        """Enqueue the launches of a call with the same key and addresses, and return its outputs.

        None if there are none. ``given`` are the arguments. The lookup by addresses comes first: a
        nested tensor, which a guard does not survive, seldom passes it.
        """
        launch_key = key[:3]
        try:
            replay = self._replays.get(launch_key)
            if replay is None or not replay.guard(*key.tensors):
                return None
        except (RuntimeError, TypeError, UserWarning):
            return None
        outputs = replay.outputs_of(given)
        launches = replay.launches
        if launches is None:
            replay = self._replays.get((*launch_key, _pointers_of(outputs)))
            if replay is None or replay.launches is None:
                return None
            launches = replay.launches
        for launch in launches:
            launch.enqueue(replay.enable_pdl)
        return outputs

    def store_replay(self, key: CallKey, replay: Replay, new: Tensors | None) -> None:
        """Cache launches for :meth:`replay`; ``new`` are the outputs if one was allocated.

        Zeros of either sign compare equal, but kernels distinguish them: they have no replay.
        """
        if not all(key.floats):
            return
        if new is None:
            _store(self._replays, key[:3], replay, _MAX_LAUNCHES)
            return
        _store(self._replays, key[:3], replay._replace(launches=None), _MAX_LAUNCHES)
        _store(self._replays, (*key[:3], _pointers_of(new)), replay, _MAX_LAUNCHES)

    def find(self, key: CallKey) -> GuardedEntry[LauncherT] | None:
        """Return the entry of a key whose guard accepts its tensors, if there is one."""
        entries = self._entries.get(key.of_entries, ())
        if not entries or any(map(_is_nested, key.tensors)) or not key.has_memory:
            return None
        return next((entry for entry in entries if entry.guard(*key.tensors)), None)

    def store(self, signature: Hashable, launcher: LauncherT) -> None:
        """Cache a launcher by its signature."""
        _store(self.launchers, signature, launcher, _MAX_CALLS)

    def add(
        self, key: CallKey, signature: Hashable, types: tuple[type, ...]
    ) -> GuardedEntry[LauncherT] | None:
        """Make the launcher of a signature the first entry of a key, and return the entry.

        The present entries of the key reject its tensors. None if it gets no guard.
        """
        of_entries = key.of_entries
        entries = self._entries.get(of_entries, ())
        state = self._guards.get((signature, of_entries))
        if state is None:
            state = _GuardState()
            _store(self._guards, (signature, of_entries), state, _MAX_CALLS)
        needs_guard = state.entry is None or state.entry in entries
        if needs_guard and state.num_attempts < _MAX_GUARDS:
            state.num_attempts += 1
            guard = make_guard(key.tensors)
            launcher = self.launchers[signature]
            state.entry = None if guard is None else GuardedEntry(launcher, guard, types)
        if state.entry is not None and state.entry not in entries:
            updated = (state.entry, *entries[: _MAX_ENTRIES_PER_KEY - 1])
            _store(self._entries, of_entries, updated, _MAX_CALLS)
        return state.entry


def _pointers_of(tensors: Tensors) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def _store(table: dict[KeyT, ValueT], key: KeyT, value: ValueT, max_entries: int) -> None:
    if len(table) >= max_entries:
        table.clear()
    table[key] = value
