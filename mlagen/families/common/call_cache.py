"""Two-level call cache of validated and planned calls.

Level 1, the fast path, keys on scalars and a tensor guard; with equal base addresses it replays the
packed launches. Level 2 keys on the full argument signature, which is everything that a check or a
plan may depend on, and reuses the validated plan. Building a signature costs much more than
checking a guard, hence level 1. A guard accepts real tensors only; a signature does not distinguish
them from fake ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

import torch

from mlagen.families.common.tensor_guard import Guard, can_guard, make_guard
from mlagen.runtime.launch import Launch

# Cached signatures; a server sees a few for each batch size.
_MAX_CALLS = 8192

# A signature gets another guard if the current one rejects tensors with that signature, such as
# inference tensors, but not at every call: making a guard costs more than building a signature.
_MAX_GUARDS = 4

# Guarded entries tried for one key, such as two batches or two GPUs that alternate.
_MAX_ENTRIES_PER_KEY = 4

# Cached launches; a model has one for each layer.
_MAX_LAUNCHES = 4096

CallT = TypeVar("CallT")
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


_pointer_of = torch.Tensor.data_ptr
_is_nested = attrgetter("is_nested")


@dataclass(frozen=True, eq=False)
class GuardedEntry(Generic[CallT]):
    """A cached call and the guard that accepts its tensors."""

    call: CallT
    guard: Guard


def launch_key_of(
    entry: GuardedEntry[CallT], numbers: tuple[float, ...], tensors: tuple[torch.Tensor, ...]
) -> tuple[Hashable, ...]:
    """Return everything that the launches of an entry depend on; ``tensors`` include the output."""
    return (entry, *numbers, *map(_pointer_of, tensors))


@dataclass(eq=False)
class FastPathKey(Generic[CallT]):
    """The fast-path key of a call that was not replayed.

    Calls with one key whose tensors pass one guard have the same signature.
    """

    key: Hashable
    tensors: tuple[torch.Tensor, ...]
    entry: GuardedEntry[CallT] | None  # that accepted the tensors
    out: torch.Tensor | None = None  # given or already allocated
    launch_key: tuple[Hashable, ...] | None = None  # to cache the launches by


@dataclass(eq=False)
class _GuardState(Generic[CallT]):
    """The guarded entry of one signature under one key."""

    entry: GuardedEntry[CallT] | None = None
    num_attempts: int = 0  # to make a guard


class CallCache(dict[Hashable, CallT]):
    """Validated and planned calls by signature; None is no signature.

    Holds the guarded entries of the fast path and their launches too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._guards: dict[Hashable, _GuardState[CallT]] = {}
        self._entries: dict[Hashable, tuple[GuardedEntry[CallT], ...]] = {}
        self._launches: dict[Hashable, Sequence[Launch]] = {}

    def find(
        self, signature: Hashable, fast_path: FastPathKey[CallT] | None = None
    ) -> CallT | None:
        """Return the call with ``signature``, if it is cached.

        With ``fast_path`` it becomes a guarded entry of that key.
        """
        try:
            call = self.get(signature) if signature is not None else None
        except TypeError:  # an unhashable value, such as a list; a check rejects it later
            return None
        if call is not None and fast_path is not None:
            self._add(signature, call, fast_path)
        return call

    def store(
        self, signature: Hashable, call: CallT, fast_path: FastPathKey[CallT] | None = None
    ) -> CallT:
        """Cache a call, and return it."""
        _store(self, signature, call, _MAX_CALLS)
        if fast_path is not None:
            self._add(signature, call, fast_path)
        return call

    def lookup_guarded(
        self, key: Hashable, tensors: tuple[torch.Tensor, ...]
    ) -> GuardedEntry[CallT] | None:
        """Return the entry of a key whose guard accepts these tensors, if there is one."""
        try:
            entries = self._entries.get(key, ())
            if not entries or any(map(_is_nested, tensors)):
                return None
        except (AttributeError, TypeError):  # no tensor, or an unhashable value
            return None
        for entry in entries:
            if entry.guard(*tensors):
                return entry
        return None

    def make_key(
        self, key: Hashable, tensors: tuple[torch.Tensor, ...]
    ) -> FastPathKey[CallT] | None:
        """Return the fast-path key of a call; None where torch has no guards."""
        entry = self.lookup_guarded(key, tensors)
        return FastPathKey(key, tensors, entry) if entry is not None or can_guard() else None

    def lookup_by_parts(
        self,
        key: Hashable,
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        *,
        caches_launches: bool,
    ) -> FastPathKey[CallT] | None:
        """Return the fast-path key of a call, with the entry that accepts its tensors, if any.

        With ``caches_launches`` it has a launch key; the caller appends the addresses of outputs
        that it allocates. None where torch has no guards.
        """
        entry = self.lookup_guarded(key, tensors)
        if entry is None:
            return FastPathKey(key, tensors, None) if can_guard() else None
        pointers = tuple(map(_pointer_of, tensors))
        if 0 in pointers and not _have_memory(tensors, pointers):
            return FastPathKey(key, tensors, None)
        # As in try_replay, zeros of either sign compare equal.
        launch_key = (entry, *numbers, *pointers) if caches_launches and all(numbers) else None
        return FastPathKey(key, tensors, entry, None, launch_key)

    def try_replay(
        self,
        key: Hashable,
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        out: torch.Tensor | None,
        enable_pdl: bool,
        new_out: Callable[[CallT], torch.Tensor],
    ) -> torch.Tensor | FastPathKey[CallT] | None:
        """Replay a call that was launched before and return its output, or its fast-path key.

        ``new_out`` allocates an output that is not given.
        """
        if out is not None and self.replay(key, tensors, numbers, enable_pdl):
            return out
        fast_path = self.make_key(key, tensors)
        if fast_path is None or fast_path.entry is None:
            return fast_path
        allocated: tuple[torch.Tensor, ...] = ()
        if out is None:
            out = new_out(fast_path.entry.call)
            allocated = (out,)
            if self.replay(key, tensors, numbers, enable_pdl, allocated):
                return out
        launch_key = launch_key_of(fast_path.entry, numbers, tensors + allocated)
        if 0 in launch_key[1 + len(numbers) :]:  # a guard does not detect freed storage
            fast_path.entry = None
            return fast_path
        fast_path.out = out
        if all(numbers):  # zeros of either sign compare equal, but kernels distinguish them
            fast_path.launch_key = launch_key
        return fast_path

    def replay(
        self,
        key: Hashable,
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        enable_pdl: bool,
        allocated: tuple[torch.Tensor, ...] = (),
    ) -> bool:
        """Enqueue the cached launches of an entry of a key with the same values, if there are any.

        Returns whether there are. ``allocated`` are outputs that the caller did not give. The
        lookup by addresses comes first: a nested tensor, which a guard does not survive, seldom
        passes it.
        """
        found = None
        all_tensors = tensors + allocated
        try:
            for entry in self._entries.get(key, ()):
                launches = self._launches.get(launch_key_of(entry, numbers, all_tensors))
                if launches is not None and entry.guard(*tensors):
                    found = launches
                    break
        except (RuntimeError, TypeError, UserWarning):  # no tensor, or one without an address
            return False
        if found is None:
            return False
        for launch in found:
            launch.enqueue(enable_pdl)
        return True

    def is_valid(self, signature: Hashable, fast_path: FastPathKey[CallT] | None) -> bool:
        """Whether all tensors of a call are known to be in memory, and none of them requires grad.

        The guard of its signature still proves it where the entry was evicted from its key.
        """
        state = None if fast_path is None else self._guards.get((signature, fast_path.key))
        if fast_path is None or state is None or state.entry is None:
            return False
        is_accepted = state.entry.guard(*fast_path.tensors) is True
        return is_accepted and _have_memory(fast_path.tensors, map(_pointer_of, fast_path.tensors))

    def replay_launches(self, launch_key: Hashable, enable_pdl: bool) -> bool:
        """Enqueue the launches cached under a key; returns whether there are any."""
        launches = self._launches.get(launch_key)
        if launches is None:
            return False
        for launch in launches:
            launch.enqueue(enable_pdl)
        return True

    def store_launches(self, launch_key: Hashable, launches: Sequence[Launch]) -> None:
        """Cache launches for :meth:`replay_launches`."""
        _store(self._launches, launch_key, launches, _MAX_LAUNCHES)

    def clear(self) -> None:
        """Drop all entries of both levels."""
        super().clear()
        for table in (self._guards, self._entries, self._launches):
            table.clear()

    def _add(self, signature: Hashable, call: CallT, fast_path: FastPathKey[CallT]) -> None:
        """Make a call the first entry of its key; the present entries reject its tensors."""
        try:
            entries = self._entries.get(fast_path.key, ())
        except TypeError:
            return
        state = self._guards.get((signature, fast_path.key))
        if state is None:
            state = _GuardState()
            _store(self._guards, (signature, fast_path.key), state, _MAX_CALLS)
        needs_guard = state.entry is None or state.entry in entries
        if needs_guard and state.num_attempts < _MAX_GUARDS:
            state.num_attempts += 1
            guard = make_guard(fast_path.tensors)
            state.entry = None if guard is None else GuardedEntry(call, guard)
        if state.entry is not None and state.entry not in entries:
            updated = (state.entry, *entries[: _MAX_ENTRIES_PER_KEY - 1])
            _store(self._entries, fast_path.key, updated, _MAX_CALLS)


def _have_memory(tensors: tuple[torch.Tensor, ...], pointers: Iterable[int]) -> bool:
    # A guard does not detect freed storage; empty tensors need no storage.
    pairs = zip(tensors, pointers, strict=True)
    return all(pointer or not tensor.numel() for tensor, pointer in pairs)


def _store(table: dict[KeyT, ValueT], key: KeyT, value: ValueT, max_entries: int) -> None:
    if len(table) >= max_entries:
        table.clear()
    table[key] = value
