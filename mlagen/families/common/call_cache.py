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
from typing import Generic, NamedTuple, TypeVar

import torch

from mlagen.families.common.tensor_guard import Guard, is_nested, make_guard
from mlagen.runtime.launch import Launch
from mlagen.settings import Settings

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
    outputs_of: Callable[[tuple[torch.Tensor | None, ...]], Tensors]  # given or new
    computed_of: Callable[..., Tensors]  # what the kernels read besides the tensors
    launches: Sequence[Launch] | None  # None: by the addresses of new outputs and computed tensors
    enable_pdl: bool


class CallCache(Generic[LauncherT]):
    """Launchers by signature and by guarded key, and their launches by key and addresses.

    All of them are for one object of settings.
    """

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.launchers: dict[Hashable, LauncherT] = {}
        self.replays: dict[Hashable, Replay] = {}
        self._guards: dict[Hashable, _GuardState[LauncherT]] = {}
        self._entries: dict[Hashable, tuple[GuardedEntry[LauncherT], ...]] = {}

    def clear(self, settings: Settings | None = None) -> None:
        """Drop all entries of both levels; later ones are for ``settings``."""
        for table in (self.launchers, self._guards, self._entries, self.replays):
            table.clear()
        self.settings = settings

    def store_replay(self, key: Hashable, replay: Replay, new: Tensors | None) -> None:
        """Cache the launches of a call.

        ``new`` are its outputs and computed tensors, if one of them was allocated.
        """
        if new is None:
            store_bounded(self.replays, key, replay, _MAX_LAUNCHES)
            return
        store_bounded(self.replays, key, replay._replace(launches=None), _MAX_LAUNCHES)
        store_bounded(self.replays, (key, pointers_of(new)), replay, _MAX_LAUNCHES)

    def find(self, key: Hashable, tensors: Tensors) -> GuardedEntry[LauncherT] | None:
        """Return the entry of a key whose guard accepts the tensors, if there is one."""
        entries = self._entries.get(key, ())
        if not entries or any(map(is_nested, tensors)) or not has_memory(tensors):
            return None
        return next((entry for entry in entries if entry.guard(*tensors)), None)

    def store(self, signature: Hashable, launcher: LauncherT) -> None:
        """Cache a launcher by its signature."""
        store_bounded(self.launchers, signature, launcher, _MAX_CALLS)

    def add(
        self,
        key: Hashable,
        tensors: Tensors,
        signature: Hashable,
        launcher: LauncherT,
        types: tuple[type, ...],
    ) -> GuardedEntry[LauncherT] | None:
        """Make the launcher of a signature the first entry of a key, and return the entry.

        The present entries of the key reject the tensors. None if it gets no guard.
        """
        entries = self._entries.get(key, ())
        state = self._guards.get((signature, key))
        if state is None:
            state = _GuardState()
            store_bounded(self._guards, (signature, key), state, _MAX_CALLS)
        needs_guard = state.entry is None or state.entry in entries
        if needs_guard and state.num_attempts < _MAX_GUARDS:
            state.num_attempts += 1
            guard = make_guard(tensors)
            state.entry = None if guard is None else GuardedEntry(launcher, guard, types)
        if state.entry is not None and state.entry not in entries:
            updated = (state.entry, *entries[: _MAX_ENTRIES_PER_KEY - 1])
            store_bounded(self._entries, key, updated, _MAX_CALLS)
        return state.entry


def pointers_of(tensors: Tensors) -> tuple[int, ...]:
    """Return the base addresses of tensors."""
    return tuple(map(torch.Tensor.data_ptr, tensors))


def has_memory(tensors: Tensors) -> bool:
    """Whether all tensors have storage, which a guard does not check; empty ones need none."""
    try:
        return all(tensor.data_ptr() or not tensor.numel() for tensor in tensors)
    except Exception:  # noqa: BLE001 - any kind without an address, such as one of vmap
        return False


def store_bounded(table: dict[KeyT, ValueT], key: KeyT, value: ValueT, max_entries: int) -> None:
    """Add an entry to a table that other threads use too; a full one drops its oldest entries.

    Not one at a time: the search of the first entry passes those that were dropped.
    """
    if len(table) >= max_entries and key not in table:
        for oldest in list(table)[: 1 + max_entries // 8]:
            table.pop(oldest, None)
    table[key] = value
