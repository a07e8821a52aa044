"""Capacity of the call cache, and the keys of calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.families.common import call_cache
from mlagen.families.common.call_cache import CallCache, Replay, pointers_of
from mlagen.families.common.call_key import KeyKinds, compile_key, factors_of

TENSORS = (torch.ones(2), torch.zeros(3))


def test_the_cache_has_a_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full table is cleared before the next entry, and ``clear`` drops both levels."""
    monkeypatch.setattr(call_cache, "_MAX_CALLS", 3)
    monkeypatch.setattr(call_cache, "_MAX_LAUNCHES", 3)
    calls: CallCache[str] = CallCache()

    for number in range(7):
        calls.store(("signature", number), "call")
        entry = calls.add(("key", number), TENSORS, ("signature", number), ())
        assert entry is not None
        replay = Replay(entry.guard, lambda _: TENSORS, lambda *_: (), (), enable_pdl=True)
        calls.store_replay(("key", number), replay, None)
        tables = (calls.launchers, calls._entries, calls._guards, calls.replays)
        assert all(len(table) <= 3 for table in tables)

    found = calls.find(("key", 6), TENSORS)
    assert found is not None
    assert found.launcher == "call"
    assert calls.launchers.get(("signature", 5)) is None
    calls.clear()
    assert calls.find(("key", 6), TENSORS) is None
    assert not any((calls.launchers, calls._entries, calls._guards, calls.replays))


def test_launches_of_new_outputs_are_found_by_their_addresses() -> None:
    """The launches of a key are known for each new output that was allocated before."""
    calls: CallCache[str] = CallCache()
    replay = Replay(lambda *_: True, lambda _: TENSORS, lambda *_: (), (), enable_pdl=True)

    calls.store_replay("key", replay, TENSORS)

    assert calls.replays["key"].launches is None
    assert calls.replays["key", pointers_of(TENSORS)].launches == ()


def decode(
    query: Any, caches: Any, out: Any, scale: Any, length: Any, rank: Any, word: Any = "auto"
) -> None:
    """Stand for an entry point."""


key_of = compile_key(
    decode,
    KeyKinds(
        tensors="query",
        groups="caches",
        optional="out",
        outputs="out",
        scales="scale",
        length="length",
        ints="rank",
        words="word",
    ),
)
QUERY, KEY, VALUE, OUT = (torch.zeros(1) for _ in range(4))
CALL = (QUERY, (KEY, VALUE), OUT, 0.5, 70, 512, "auto")


def test_a_key_has_the_tensors_in_order() -> None:
    """Tensors of pairs and lists, outputs and scales are tensors of the key."""
    key = key_of(*CALL)

    assert key is not None
    _, length, tensors, outputs = key
    assert length == 70
    assert list(map(id, tensors)) == list(map(id, (QUERY, KEY, VALUE, OUT)))
    assert outputs == (OUT,)
    scale = torch.ones(1)
    other = key_of(QUERY, [KEY], None, scale, 70, 512, "auto")
    assert other is not None
    assert list(map(id, other[2])) == list(map(id, (QUERY, KEY, scale)))
    assert other[3] == (None,)


def test_keys_of_different_calls_differ() -> None:
    """Each argument, each type and each form of the optional tensors has its own key."""
    calls = [
        CALL,
        (QUERY, [KEY, VALUE], OUT, 0.5, 70, 512, "auto"),
        (QUERY, KEY, OUT, 0.5, 70, 512, "auto"),
        (QUERY, KEY, None, 0.5, 70, 512, "auto"),
        (QUERY, None, OUT, 0.5, 70, 512, "auto"),
        (QUERY, (KEY, VALUE), OUT, 0.25, 70, 512, "auto"),
        (QUERY, (KEY, VALUE), OUT, QUERY, 70, 512, "auto"),
        (QUERY, (KEY, VALUE), OUT, 0.5, 70, 256, "auto"),
        *((QUERY, (KEY, VALUE), OUT, 0.5, 70, 512, word) for word in ("no", 1, 1.0, True, None)),
        *((QUERY, (KEY, VALUE), OUT, 0.5, 70, 512, word) for word in (0, 0.0, -0.0, False)),
    ]

    values = [key[0] for call in calls if (key := key_of(*call)) is not None]

    assert len(values) == len(set(values)) == len(calls)


@pytest.mark.parametrize("value", [1.0, True, "1", [1], torch.tensor(1), None], ids=repr)
def test_a_value_of_another_type_has_no_key(value: object) -> None:
    """A float or a bool may equal an int, and other types may define their equality."""
    assert key_of(*CALL[:4], value, *CALL[5:]) is None
    assert key_of(*CALL[:5], value, *CALL[6:]) is None


@pytest.mark.parametrize("word", [[1], (1,), b"auto", torch.tensor(1)], ids=repr)
def test_a_word_of_another_type_has_no_key(word: object) -> None:
    """A value that may define its equality, or that is no scalar, has no key."""
    assert key_of(*CALL[:6], word) is None


def test_factors_are_1_or_are_not() -> None:
    """A signature depends on floats only as far as they are 1."""
    keys = [key_of(*CALL[:3], scale, *CALL[4:]) for scale in (0.5, 0.25, 1.0)]
    factors = [factors_of(key) for key in keys if key is not None]

    assert factors[0] == factors[1] != factors[2]
