"""How many calls and launches are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.api import remembered
from mlagen.api.remembered import RememberedCalls, Usual, passed_with

TENSORS = (torch.ones(2), torch.zeros(3))


class Counted:
    """Stands for a launch."""

    def __init__(self) -> None:
        self.enqueued: list[bool] = []

    def enqueue(self, enable_pdl: bool) -> None:
        """Count it."""
        self.enqueued.append(enable_pdl)


def remembered_launches(calls: RememberedCalls[str], launches: list[Any]) -> None:
    """Keep ``launches`` as those of a usual call with one number."""
    calls.keep("form", "call", Usual("key", TENSORS, None))
    recent = calls.find_recent("key", TENSORS)
    assert recent is not None
    calls.keep_launches(passed_with(recent, (1.0,), TENSORS), launches)


def test_launches_are_kept_by_all_that_was_passed() -> None:
    """Each is made again, in order, with the choice of the moment."""
    calls: RememberedCalls[str] = RememberedCalls()
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

    assert calls.launch_again("key", TENSORS, (1.0,), True)
    for key, tensors, numbers, made in others:
        assert not calls.launch_again(key, tensors, numbers, True, made)
    assert calls.launch_again("key", TENSORS, (1.0,), False)
    assert [launch.enqueued for launch in both] == [[True, False]] * 2


def test_no_more_is_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is forgotten then, and remembered anew."""
    monkeypatch.setattr(remembered, "_MOST_CALLS", 3)
    monkeypatch.setattr(remembered, "_MOST_LAUNCHES", 3)
    calls: RememberedCalls[str] = RememberedCalls()

    for number in range(7):
        calls.keep(("form", number), "call", Usual(("key", number), TENSORS, None))
        calls.keep_launches(("passed", number), ())
        kept = (calls, calls._recent, calls._guarded, calls._launches)
        assert all(len(each) <= 3 for each in kept)

    assert calls.find(("form", 6)) == "call"
    assert calls.find(("form", 5)) is None
    recent = calls.find_recent(("key", 6), TENSORS)
    assert recent is not None
    assert recent.call == "call"


def test_what_cannot_be_hashed_is_no_key() -> None:
    """It is refused later, in words."""
    calls: RememberedCalls[str] = RememberedCalls()
    listed: Any = [1]

    calls.keep("form", "call", Usual(listed, TENSORS, None))

    assert calls.find_recent(listed, TENSORS) is None
    assert calls.find("form", Usual(listed, TENSORS, None)) == "call"
    assert calls.find(listed) is None


def test_all_is_forgotten() -> None:
    """Launches too, which would otherwise be made of kernels that nobody asks for."""
    calls: RememberedCalls[str] = RememberedCalls()
    remembered_launches(calls, [])
    assert calls.launch_again("key", TENSORS, (1.0,), True)

    calls.clear()

    assert calls.find("form") is None
    assert calls.find_recent("key", TENSORS) is None
    assert not calls.launch_again("key", TENSORS, (1.0,), True)
