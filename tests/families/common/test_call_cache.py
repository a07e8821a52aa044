"""Capacity and keys of the call cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.families.common import call_cache
from mlagen.families.common.call_cache import CallCache, FastPathKey, launch_key_of

TENSORS = (torch.ones(2), torch.zeros(3))


class Counted:
    """A launch that counts its enqueues."""

    def __init__(self) -> None:
        self.enqueued: list[bool] = []

    def enqueue(self, enable_pdl: bool) -> None:
        """Count it."""
        self.enqueued.append(enable_pdl)


def store_launches(calls: CallCache[str], launches: list[Any]) -> None:
    """Cache ``launches`` for a fast-path call with one number."""
    calls.store("signature", "call", FastPathKey("key", TENSORS, None))
    entry = calls.lookup_guarded("key", TENSORS)
    assert entry is not None
    calls.store_launches(launch_key_of(entry, (1.0,), TENSORS), launches)


def test_launches_are_keyed_by_all_values() -> None:
    """A replay enqueues all launches in order, with the current ``enable_pdl``."""
    calls: CallCache[str] = CallCache()
    both: list[Any] = [Counted(), Counted()]
    store_launches(calls, both)
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


def test_the_cache_has_a_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full table is cleared before the next entry."""
    monkeypatch.setattr(call_cache, "_MAX_CALLS", 3)
    monkeypatch.setattr(call_cache, "_MAX_LAUNCHES", 3)
    calls: CallCache[str] = CallCache()

    for number in range(7):
        calls.store(("signature", number), "call", FastPathKey(("key", number), TENSORS, None))
        calls.store_launches(("passed", number), ())
        tables = (calls, calls._entries, calls._guards, calls._launches)
        assert all(len(table) <= 3 for table in tables)

    assert calls.find(("signature", 6)) == "call"
    assert calls.find(("signature", 5)) is None
    entry = calls.lookup_guarded(("key", 6), TENSORS)
    assert entry is not None
    assert entry.call == "call"


def test_an_unhashable_value_is_no_key() -> None:
    """An unhashable key misses, so that a check can reject the value."""
    calls: CallCache[str] = CallCache()
    unhashable: Any = [1]

    calls.store("signature", "call", FastPathKey(unhashable, TENSORS, None))

    assert calls.lookup_guarded(unhashable, TENSORS) is None
    assert calls.find("signature", FastPathKey(unhashable, TENSORS, None)) == "call"
    assert calls.find(unhashable) is None


def test_clear_drops_both_levels() -> None:
    """After ``clear`` neither calls nor launches are found."""
    calls: CallCache[str] = CallCache()
    store_launches(calls, [])
    assert calls.replay("key", TENSORS, (1.0,), True)

    calls.clear()

    assert calls.find("signature") is None
    assert calls.lookup_guarded("key", TENSORS) is None
    assert not calls.replay("key", TENSORS, (1.0,), True)
