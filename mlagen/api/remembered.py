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

from mlagen.api.tensor_guard import IsLike, can_guard, guard_of
from mlagen.runtime.launch import Launch

# Forms of arguments that are remembered; a server sees a few for each batch size.
_MOST_CALLS = 8192

# A guard costs as much as reading two forms. A form gets another if its own denies tensors of that
# form, such as inference tensors, but not at every call.
_MOST_GUARDS = 4

# Calls of one key that are tried, such as those of two batches, or on two GPUs, that come in turn.
_MOST_RECENT = 4

# Launches that are remembered; a model has one for each of its layers.
_MOST_LAUNCHES = 4096

CallT = TypeVar("CallT")
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


_pointer_of = torch.Tensor.data_ptr
_is_nested = attrgetter("is_nested")


@dataclass(frozen=True, eq=False)
class Recent(Generic[CallT]):
    """A call lately made with a key, and what says whether tensors are like its own."""

    call: CallT
    is_like: IsLike


def passed_with(
    recent: Recent[CallT], numbers: tuple[float, ...], tensors: tuple[torch.Tensor, ...]
) -> tuple[Hashable, ...]:
    """Return all that launches of a recent call depend on; the output is one of ``tensors``."""
    return (recent, *numbers, *map(_pointer_of, tensors))


@dataclass(eq=False)
class Usual(Generic[CallT]):
    """A usual call that was not launched again: what to remember it by.

    Usual calls of one key, whose tensors are alike, have the same form.
    """

    key: Hashable
    tensors: tuple[torch.Tensor, ...]
    recent: Recent[CallT] | None  # that was found
    out: torch.Tensor | None = None  # that was made for it, or given
    passed: tuple[Hashable, ...] | None = None  # what its launches are to be remembered by


@dataclass(eq=False)
class _Guarded(Generic[CallT]):
    """What the call of a form has when it is a recent one of a key."""

    recent: Recent[CallT] | None = None
    guards: int = 0  # that were made, or tried to


class RememberedCalls(dict[Hashable, CallT]):
    """Calls that are checked and planned, by the form of their arguments; None is no form.

    With them the recent ones of usual calls, and what these launched.
    """

    def __init__(self) -> None:
        super().__init__()
        self._guarded: dict[Hashable, _Guarded[CallT]] = {}
        self._recent: dict[Hashable, tuple[Recent[CallT], ...]] = {}
        self._launches: dict[Hashable, Sequence[Launch]] = {}

    def find(self, form: Hashable, usual: Usual[CallT] | None = None) -> CallT | None:
        """Return the call of a form, if it is remembered.

        A ``usual`` one is a recent one of its key from now on.
        """
        try:
            call = self.get(form) if form is not None else None
        except TypeError:  # something in it cannot be hashed, such as a list, and will be refused
            return None
        if call is not None and usual is not None:
            self._note(form, call, usual)
        return call

    def keep(self, form: Hashable, call: CallT, usual: Usual[CallT] | None = None) -> CallT:
        """Remember a call, and return it."""
        _keep(self, form, call, _MOST_CALLS)
        if usual is not None:
            self._note(form, call, usual)
        return call

    def find_recent(self, key: Hashable, tensors: tuple[torch.Tensor, ...]) -> Recent[CallT] | None:
        """Return the recent call of a key whose tensors are like these, if there is one."""
        try:
            recents = self._recent.get(key, ())
            if not recents or any(map(_is_nested, tensors)):
                return None
        except (AttributeError, TypeError):  # no tensor, or what cannot be hashed
            return None
        for recent in recents:
            if recent.is_like(*tensors):
                return recent
        return None

    def find_unlaunched(
        self, key: Hashable, tensors: tuple[torch.Tensor, ...]
    ) -> Usual[CallT] | None:
        """Return what to remember a usual call by; None where torch has no guards."""
        recent = self.find_recent(key, tensors)
        return Usual(key, tensors, recent) if recent is not None or can_guard() else None

    def find_alike(
        self,
        key: Hashable,
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        *,
        is_launched: bool,
    ) -> Usual[CallT] | None:
        """Return a call by its key, with the recent one whose tensors are like its own, if any.

        Its launches are remembered if it ``is_launched`` by them; outputs that are made for it are
        to be added to what they are remembered by. None where torch has no guards.
        """
        recent = self.find_recent(key, tensors)
        if recent is None:
            return Usual(key, tensors, None) if can_guard() else None
        pointers = tuple(map(_pointer_of, tensors))
        if 0 in pointers and not _have_memory(tensors, pointers):
            return Usual(key, tensors, None)
        # As in run_again, zeros of both signs are equal.
        passed = (recent, *numbers, *pointers) if is_launched and all(numbers) else None
        return Usual(key, tensors, recent, None, passed)

    def run_again(
        self,
        key: Hashable,
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        out: torch.Tensor | None,
        enable_pdl: bool,
        new_out: Callable[[CallT], torch.Tensor],
    ) -> torch.Tensor | Usual[CallT] | None:
        """Return the output of a usual call that was launched before, or what to remember it by.

        ``new_out`` makes an output that is not given.
        """
        if out is not None and self.launch_again(key, tensors, numbers, enable_pdl):
            return out
        usual = self.find_unlaunched(key, tensors)
        if usual is None or usual.recent is None:
            return usual
        made: tuple[torch.Tensor, ...] = ()
        if out is None:
            out = new_out(usual.recent.call)
            made = (out,)
            if self.launch_again(key, tensors, numbers, enable_pdl, made):
                return out
        passed = passed_with(usual.recent, numbers, tensors + made)
        if 0 in passed[1 + len(numbers) :]:  # no guard sees that storage was freed
            usual.recent = None
            return usual
        usual.out = out
        if all(numbers):  # zeros of both signs are equal, and are not passed alike
            usual.passed = passed
        return usual

    def launch_again(
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
        passed = tensors + made
        try:
            for recent in self._recent.get(key, ()):
                launches = self._launches.get(passed_with(recent, numbers, passed))
                if launches is not None and recent.is_like(*tensors):
                    found = launches
                    break
        except (RuntimeError, TypeError, UserWarning):  # no tensor, or one without an address
            return False
        if found is None:
            return False
        for launch in found:
            launch.enqueue(enable_pdl)
        return True

    def is_sound(self, form: Hashable, usual: Usual[CallT] | None) -> bool:
        """Whether all tensors of a call are known to be in memory, and none of them requires grad.

        The guard of its form may say so, where there are too many recent calls of its key.
        """
        guarded = None if usual is None else self._guarded.get((form, usual.key))
        if usual is None or guarded is None or guarded.recent is None:
            return False
        is_like = guarded.recent.is_like(*usual.tensors) is True
        return is_like and _have_memory(usual.tensors, map(_pointer_of, usual.tensors))

    def relaunch(self, passed: Hashable, enable_pdl: bool) -> bool:
        """Enqueue what was launched with some values, if anything was; returns whether it was."""
        launches = self._launches.get(passed)
        if launches is None:
            return False
        for launch in launches:
            launch.enqueue(enable_pdl)
        return True

    def keep_launches(self, passed: Hashable, launches: Sequence[Launch]) -> None:
        """Remember what was launched with some values."""
        _keep(self._launches, passed, launches, _MOST_LAUNCHES)

    def clear(self) -> None:
        """Forget all calls."""
        super().clear()
        for kept in (self._guarded, self._recent, self._launches):
            kept.clear()

    def _note(self, form: Hashable, call: CallT, usual: Usual[CallT]) -> None:
        """Have a call be a recent one of its key, where the others deny its tensors."""
        try:
            denied = self._recent.get(usual.key, ())
        except TypeError:
            return
        guarded = self._guarded.get((form, usual.key))
        if guarded is None:
            guarded = _Guarded()
            _keep(self._guarded, (form, usual.key), guarded, _MOST_CALLS)
        is_wanted = guarded.recent is None or guarded.recent in denied
        if is_wanted and guarded.guards < _MOST_GUARDS:
            guarded.guards += 1
            is_like = guard_of(usual.tensors)
            guarded.recent = None if is_like is None else Recent(call, is_like)
        if guarded.recent is not None and guarded.recent not in denied:
            recents = (guarded.recent, *denied[: _MOST_RECENT - 1])
            _keep(self._recent, usual.key, recents, _MOST_CALLS)


def _have_memory(tensors: tuple[torch.Tensor, ...], pointers: Iterable[int]) -> bool:
    # No guard sees that storage was freed; what has no elements needs none.
    each = zip(tensors, pointers, strict=True)
    return all(pointer or not tensor.numel() for tensor, pointer in each)


def _keep(kept: dict[KeyT, ValueT], key: KeyT, value: ValueT, most: int) -> None:
    if len(kept) >= most:
        kept.clear()
    kept[key] = value
