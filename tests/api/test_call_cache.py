"""How many calls and launches are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.api import call_cache
from mlagen.api.call_cache import CallCache, FastPathKey, launch_key_of

TENSORS = (torch.ones(2), torch.zeros(3))


class Counted:
    """Stands for a launch."""

    def __init__(self) -> None:
        self.enqueued: list[bool] = []

    def enqueue(self, enable_pdl: bool) -> None:
        """Count it."""
        self.enqueued.append(enable_pdl)


def remembered_launches(calls: CallCache[str], launches: list[Any]) -> None:
    """Keep ``launches`` as those of a usual call with one number."""
    calls.keep("form", "call", FastPathKey("key", TENSORS, None))
    entry = calls.lookup_guarded("key", TENSORS)
    assert entry is not None
    calls.store_launches(launch_key_of(entry, (1.0,), TENSORS), launches)


def test_launches_are_kept_by_all_that_was_passed() -> None:
    """Each is made again, in order, with the choice of the moment."""
    calls: CallCache[str] = CallCache()
    both: list[Any] = [Counted(), Counted()]
    remembered_launches(calls, both)
    others: list[tuple[Any, Any, tuple[float, ...], tuple[torch.Tensor, ...]]] = [
        ("another", TENSORS, (1.0,), ()),
        (["no", "key"], TENSORS, (1.0,), ()),
        ("key", (TENSORS[0], TENSORS[1].clone()), (1.0,), ()),
        ("key", (TENSORS[0], TENSORS[1][:2]), (1.0,), ()),
        ("key", (TENSORS[0], "no tensor"), (1.0,), ()),
        ("key", TENSORS, (2.0,), ()),
        ("key", TENSORS, (1.0,), (TENSORS[1],)),
    ]

    assert calls.replay("key", TENSORS, (1.0,), True)
    for key, tensors, numbers, made in others:
        assert not calls.replay(key, tensors, numbers, True, made)
    assert calls.replay("key", TENSORS, (1.0,), False)
    assert [launch.enqueued for launch in both] == [[True, False]] * 2


def test_no_more_is_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is forgotten then, and remembered anew."""
    monkeypatch.setattr(call_cache, "_MAX_CALLS", 3)
    monkeypatch.setattr(call_cache, "_MAX_LAUNCHES", 3)
    calls: CallCache[str] = CallCache()

    for number in range(7):
        calls.keep(("form", number), "call", FastPathKey(("key", number), TENSORS, None))
        calls.store_launches(("passed", number), ())
        kept = (calls, calls._entries, calls._guards, calls._launches)
        assert all(len(each) <= 3 for each in kept)

    assert calls.find(("form", 6)) == "call"
    assert calls.find(("form", 5)) is None
    entry = calls.lookup_guarded(("key", 6), TENSORS)
    assert entry is not None
    assert entry.call == "call"


def test_what_cannot_be_hashed_is_no_key() -> None:
    """It is rejected later, in words."""
    calls: CallCache[str] = CallCache()
    listed: Any = [1]

    calls.keep("form", "call", FastPathKey(listed, TENSORS, None))

    assert calls.lookup_guarded(listed, TENSORS) is None
    assert calls.find("form", FastPathKey(listed, TENSORS, None)) == "call"
    assert calls.find(listed) is None


def test_all_is_forgotten() -> None:
    """Launches too, which would otherwise be made of kernels that nobody asks for."""
    calls: CallCache[str] = CallCache()
    remembered_launches(calls, [])
    assert calls.replay("key", TENSORS, (1.0,), True)

    calls.clear()

    assert calls.find("form") is None
    assert calls.lookup_guarded("key", TENSORS) is None
    assert not calls.replay("key", TENSORS, (1.0,), True)
