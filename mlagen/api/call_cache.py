"""Calls that are checked and planned, and how they are found again.

Every call is remembered by the form of its arguments: all that a check or a plan may depend on. A
form is dear to read. So a usual call, one of the few forms that serving has, is found by a key of
its numbers and words, and by whether its tensors are like those of one of the last calls with that
key; and where they begin as they did then, too, by the very launches of that call. Tensors that are
like those of a checked call are in memory; a form does not tell them from fake ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

import torch

from mlagen.api.tensor_guard import Guard, can_guard, make_guard
from mlagen.runtime.launch import Launch

# Forms of arguments that are remembered; a server sees a few for each batch size.
_MAX_CALLS = 8192

# A guard costs as much as reading two forms. A form gets another if its own denies tensors of that
# form, such as inference tensors, but not at every call.
_MAX_GUARDS = 4

# Calls of one key that are tried, such as those of two batches, or on two GPUs, that come in turn.
_MAX_ENTRIES_PER_KEY = 4

# Launches that are remembered; a model has one for each of its layers.
_MAX_LAUNCHES = 4096

CallT = TypeVar("CallT")
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


_pointer_of = torch.Tensor.data_ptr
_is_nested = attrgetter("is_nested")


@dataclass(frozen=True, eq=False)
class GuardedEntry(Generic[CallT]):
    """A call lately made with a key, and what says whether tensors are like its own."""

    call: CallT
    guard: Guard


def launch_key_of(
    entry: GuardedEntry[CallT], numbers: tuple[float, ...], tensors: tuple[torch.Tensor, ...]
) -> tuple[Hashable, ...]:
    """Return all that launches of a recent call depend on; the output is one of ``tensors``."""
    return (entry, *numbers, *map(_pointer_of, tensors))


@dataclass(eq=False)
class FastPathKey(Generic[CallT]):
    """A usual call that was not launched again: what to remember it by.

    Usual calls of one key, whose tensors are alike, have the same form.
    """

    key: Hashable
    tensors: tuple[torch.Tensor, ...]
    entry: GuardedEntry[CallT] | None  # that was found
    out: torch.Tensor | None = None  # that was made for it, or given
    launch_key: tuple[Hashable, ...] | None = None  # what its launches are to be remembered by


@dataclass(eq=False)
class _Guards(Generic[CallT]):
    """What the call of a form has when it is a recent one of a key."""

    entry: GuardedEntry[CallT] | None = None
    guards: int = 0  # that were made, or tried to


class CallCache(dict[Hashable, CallT]):
    """Calls that are checked and planned, by the form of their arguments; None is no form.

    With them the recent ones of usual calls, and what these launched.
    """

    def __init__(self) -> None:
        super().__init__()
        self._guards: dict[Hashable, _Guards[CallT]] = {}
        self._entries: dict[Hashable, tuple[GuardedEntry[CallT], ...]] = {}
        self._launches: dict[Hashable, Sequence[Launch]] = {}

    def find(
        self, signature: Hashable, fast_path: FastPathKey[CallT] | None = None
    ) -> CallT | None:
        """Return the call of a form, if it is remembered.

        A ``fast_path`` one is a recent one of its key from now on.
        """
        try:
            call = self.get(signature) if signature is not None else None
        except TypeError:  # something in it cannot be hashed, such as a list, and will be rejected
            return None
        if call is not None and fast_path is not None:
            self._add(signature, call, fast_path)
        return call

    def keep(
        self, signature: Hashable, call: CallT, fast_path: FastPathKey[CallT] | None = None
    ) -> CallT:
        """Remember a call, and return it."""
        _keep(self, signature, call, _MAX_CALLS)
        if fast_path is not None:
            self._add(signature, call, fast_path)
        return call

    def lookup_guarded(
        self, key: Hashable, tensors: tuple[torch.Tensor, ...]
    ) -> GuardedEntry[CallT] | None:
        """Return the recent call of a key whose tensors are like these, if there is one."""
        try:
            entries = self._entries.get(key, ())
            if not entries or any(map(_is_nested, tensors)):
                return None
        except (AttributeError, TypeError):  # no tensor, or what cannot be hashed
            return None
        for entry in entries:
            if entry.guard(*tensors):
                return entry
        return None

    def make_key(
        self, key: Hashable, tensors: tuple[torch.Tensor, ...]
    ) -> FastPathKey[CallT] | None:
        """Return what to remember a usual call by; None where torch has no guards."""
        entry = self.lookup_guarded(key, tensors)
        return FastPathKey(key, tensors, entry) if entry is not None or can_guard() else None

    def lookup_by_parts(
        self,
        key: Hashable,
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        *,
        is_launched: bool,
    ) -> FastPathKey[CallT] | None:
        """Return a call by its key, with the recent one whose tensors are like its own, if any.

        Its launches are remembered if it ``is_launched`` by them; outputs that are made for it are
        to be added to what they are remembered by. None where torch has no guards.
        """
        entry = self.lookup_guarded(key, tensors)
        if entry is None:
            return FastPathKey(key, tensors, None) if can_guard() else None
        pointers = tuple(map(_pointer_of, tensors))
        if 0 in pointers and not _have_memory(tensors, pointers):
            return FastPathKey(key, tensors, None)
        # As in try_replay, zeros of both signs are equal.
        launch_key = (entry, *numbers, *pointers) if is_launched and all(numbers) else None
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
        """Return the output of a usual call that was launched before, or what to remember it by.

        ``new_out`` makes an output that is not given.
        """
        if out is not None and self.replay(key, tensors, numbers, enable_pdl):
            return out
        fast_path = self.make_key(key, tensors)
        if fast_path is None or fast_path.entry is None:
            return fast_path
        made: tuple[torch.Tensor, ...] = ()
        if out is None:
            out = new_out(fast_path.entry.call)
            made = (out,)
            if self.replay(key, tensors, numbers, enable_pdl, made):
                return out
        launch_key = launch_key_of(fast_path.entry, numbers, tensors + made)
        if 0 in launch_key[1 + len(numbers) :]:  # no guard sees that storage was freed
            fast_path.entry = None
            return fast_path
        fast_path.out = out
        if all(numbers):  # zeros of both signs are equal, and are not passed alike
            fast_path.launch_key = launch_key
        return fast_path

    def replay(
        self,
        key: Hashable,
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        enable_pdl: bool,
        made: tuple[torch.Tensor, ...] = (),
    ) -> bool:
        """Enqueue what a recent call of a key launched with the same values, if there was one.

        Returns whether there was. ``made`` are outputs that are not given. Where tensors begin is
        looked at first, for they are seldom nested there, which no guard may see.
        """
        found = None
        launch_key = tensors + made
        try:
            for entry in self._entries.get(key, ()):
                launches = self._launches.get(launch_key_of(entry, numbers, launch_key))
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

        The guard of its form may say so, where there are too many recent calls of its key.
        """
        guarded = None if fast_path is None else self._guards.get((signature, fast_path.key))
        if fast_path is None or guarded is None or guarded.entry is None:
            return False
        guard = guarded.entry.guard(*fast_path.tensors) is True
        return guard and _have_memory(fast_path.tensors, map(_pointer_of, fast_path.tensors))

    def replay_launches(self, launch_key: Hashable, enable_pdl: bool) -> bool:
        """Enqueue what was launched with some values, if anything was; returns whether it was."""
        launches = self._launches.get(launch_key)
        if launches is None:
            return False
        for launch in launches:
            launch.enqueue(enable_pdl)
        return True

    def store_launches(self, launch_key: Hashable, launches: Sequence[Launch]) -> None:
        """Remember what was launched with some values."""
        _keep(self._launches, launch_key, launches, _MAX_LAUNCHES)

    def clear(self) -> None:
        """Forget all calls."""
        super().clear()
        for kept in (self._guards, self._entries, self._launches):
            kept.clear()

    def _add(self, signature: Hashable, call: CallT, fast_path: FastPathKey[CallT]) -> None:
        """Have a call be a recent one of its key, where the others deny its tensors."""
        try:
            denied = self._entries.get(fast_path.key, ())
        except TypeError:
            return
        guarded = self._guards.get((signature, fast_path.key))
        if guarded is None:
            guarded = _Guards()
            _keep(self._guards, (signature, fast_path.key), guarded, _MAX_CALLS)
        is_wanted = guarded.entry is None or guarded.entry in denied
        if is_wanted and guarded.guards < _MAX_GUARDS:
            guarded.guards += 1
            guard = make_guard(fast_path.tensors)
            guarded.entry = None if guard is None else GuardedEntry(call, guard)
        if guarded.entry is not None and guarded.entry not in denied:
            entries = (guarded.entry, *denied[: _MAX_ENTRIES_PER_KEY - 1])
            _keep(self._entries, fast_path.key, entries, _MAX_CALLS)


def _have_memory(tensors: tuple[torch.Tensor, ...], pointers: Iterable[int]) -> bool:
    # No guard sees that storage was freed; what has no elements needs none.
    each = zip(tensors, pointers, strict=True)
    return all(pointer or not tensor.numel() for tensor, pointer in each)


def _keep(kept: dict[KeyT, ValueT], key: KeyT, value: ValueT, most: int) -> None:
    if len(kept) >= most:
        kept.clear()
    kept[key] = value
