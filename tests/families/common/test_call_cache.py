"""Capacity of the call cache, its guards, and the keys of calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.families.common import call_cache, tensor_guard
from mlagen.families.common.call_cache import CallCache, Replay
from mlagen.families.common.call_key import KeyKinds, compile_key, factors_of
from mlagen.mla import BatchMLAPagedAttentionWrapper
from tests.families.entry_points import ROWS, EntryPoint, make_entry_point
from tests.families.planned_runs import PLANNED_CASE
from tests.families.rejections import changed
from tests.fixture_types import Patch
from tests.problems.batch_mla import plan_arguments, run_arguments

TENSORS = (torch.ones(2), torch.zeros(3))


def test_the_cache_has_a_capacity(monkeypatch: Patch) -> None:
    """A full table drops its oldest entry, and ``clear`` drops both levels."""
    monkeypatch.setattr(call_cache, "_MAX_CALLS", 3)
    monkeypatch.setattr(call_cache, "_MAX_LAUNCHES", 3)
    calls: CallCache[str] = CallCache()

    for number in range(7):
        calls.store(("signature", number), "call")
        entry = calls.add(("key", number), TENSORS, ("signature", number), "call", ())
        assert entry is not None
        replay = Replay(entry.guard, lambda _: TENSORS, lambda *_: (), (), enable_pdl=True)
        calls.store_replay(("key", number), replay, None)
        tables = (calls.launchers, calls._entries, calls._guards, calls.replays)
        assert all(len(table) <= 3 for table in tables)

    kept = [("key", number) for number in (4, 5, 6)]
    assert [*calls.replays] == [*calls._entries] == kept
    found = calls.find(kept[0], TENSORS)
    assert found is not None
    assert found.launcher == "call"
    calls.store(("signature", 4), "another")
    assert [*calls.launchers] == [("signature", number) for number in (4, 5, 6)]
    calls.clear()
    assert calls.find(("key", 6), TENSORS) is None
    assert not any((calls.launchers, calls._entries, calls._guards, calls.replays))


def test_a_launcher_that_another_thread_dropped_gets_its_entry() -> None:
    """Threads with other settings, or a full table, drop it while its call runs."""
    calls: CallCache[str] = CallCache()
    calls.store("signature", "call")
    calls.clear()

    entry = calls.add("key", TENSORS, "signature", "call", ())

    assert entry is not None
    assert calls.find("key", TENSORS) is entry
    assert entry.launcher == "call"


KINDS = KeyKinds(tensors="query", optional="", outputs="", scales="scale", ints="rank", options="")


def decode(query: Any, scale: Any, rank: Any) -> None:
    """Stand for an entry point."""


def test_factors_are_1_or_are_not() -> None:
    """A signature depends on floats only as far as they are 1."""
    key_of = compile_key(decode, KINDS)
    keys = [key_of(torch.zeros(1), scale, 512) for scale in (0.5, 0.25, 1.0)]
    factors = [factors_of(key) for key in keys if key is not None]

    assert factors[0] == factors[1] != factors[2]


def count_guards(monkeypatch: Patch) -> list[object]:
    """Return a list that grows with each attempt to make a guard."""
    attempts: list[object] = []

    def count(tensors: tuple[torch.Tensor, ...]) -> Any:
        attempts.append(len(tensors))
        return tensor_guard.make_guard(tensors)

    monkeypatch.setattr(call_cache, "make_guard", count)
    return attempts


def test_alternating_kinds_of_tensors_have_a_guard_each(
    entry_point: EntryPoint, monkeypatch: Patch
) -> None:
    """Inference and normal tensors with one signature have one guard each."""
    attempts = count_guards(monkeypatch)
    arguments = entry_point.row.build()
    with torch.inference_mode():
        inference = changed(arguments, entry_point.row.tensors.split()[0], torch.clone)
    calls = (arguments, inference)
    expected = [entry_point.uncached_outcome(call) for call in calls]
    attempts.clear()
    entry_point.signatures.clear()

    outcomes = [[entry_point.outcome(call) for call in calls] for _ in range(9)]

    assert outcomes == [expected] * 9
    assert len(attempts) == len(entry_point.signatures) == 2


@pytest.mark.parametrize(("widths", "signatures"), [(4, 4), (5, 15)])
def test_alternating_signatures_have_a_guard_each(
    widths: int, signatures: int, monkeypatch: Patch
) -> None:
    """Signatures of one key have a guard each, even if the key has too few entries."""
    attempts = count_guards(monkeypatch)
    entry_point = make_entry_point(monkeypatch, ROWS["trtllm"])
    arguments, table = entry_point.row.build(), torch.zeros(2, 20, dtype=torch.int32)

    for _ in range(3):
        for width in range(1, widths + 1):
            entry_point.call(arguments | {"block_tables": table[:, :-width].clone()})

    assert len(attempts) == widths
    assert len(entry_point.signatures) <= signatures


def test_a_signature_has_few_guards(entry_point: EntryPoint, monkeypatch: Patch) -> None:
    """A signature whose guards reject its tensors gets no guard at every call."""
    attempts: list[object] = []

    def make_rejecting_guard(tensors: tuple[torch.Tensor, ...]) -> Any:
        attempts.append(len(tensors))
        return lambda *_: False

    monkeypatch.setattr(call_cache, "make_guard", make_rejecting_guard)
    arguments = entry_point.row.build()

    for _ in range(9):
        entry_point.call(arguments)

    assert len(attempts) == call_cache._MAX_GUARDS
    assert len(entry_point.signatures) == 9


def test_without_torch_guards_calls_read_signatures(
    entry_point: EntryPoint, monkeypatch: Patch
) -> None:
    """A torch without guards has the same results, by signatures alone."""
    monkeypatch.setattr(tensor_guard, "_valid_guards", lambda: None)
    arguments = entry_point.row.build()
    expected = entry_point.uncached_outcome(arguments)

    outcomes = [entry_point.outcome(arguments) for _ in range(3)]

    assert outcomes == [expected] * 3
    assert entry_point.reads_signature(arguments)


def test_lengths_with_equal_rounding_share_a_replay(monkeypatch: Patch) -> None:
    """A length affects the scheduling only, by four significant bits."""
    entry_point = make_entry_point(monkeypatch, ROWS["trtllm"])
    arguments = entry_point.row.build()
    entry_point.call(arguments | {"max_seq_len": 70})

    assert entry_point.is_replayed(arguments | {"max_seq_len": 71})
    assert not entry_point.is_replayed(arguments | {"max_seq_len": 73})


# Two arguments that may be one tensor.
PAIRS = {
    "trtllm": ("kv_cache", "workspace_buffer"),
    "xqa_batch_mla": ("kv_cache", "workspace_buffer"),
    "xqa_mla": ("k_cache", "v_cache"),
    "xqa": ("k_cache", "v_cache"),
    "xqa_batch": ("kv_cache", "kv_cache[1]"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_one_tensor_as_two_arguments(name: str, monkeypatch: Patch) -> None:
    """A repeated tensor hits its entry, and two distinct tensors do not."""
    entry_point, (first, second) = make_entry_point(monkeypatch, ROWS[name]), PAIRS[name]
    arguments = entry_point.row.build()
    given = arguments[first]
    tensor = given[0] if isinstance(given, tuple) else given
    repeated = changed(arguments, second, lambda _: tensor)

    outcomes = [entry_point.outcome(repeated) for _ in range(9)]

    assert outcomes == [entry_point.uncached_outcome(repeated)] * 9
    assert not entry_point.reads_signature(repeated)
    entry_point.require_independent(repeated, changed(repeated, second, torch.clone))


@pytest.mark.parametrize("name", ["trtllm", "xqa_batch"])
def test_a_call_of_no_requests_launches_nothing(name: str, monkeypatch: Patch) -> None:
    """A call without requests launches nothing, cached or not."""
    entry_point = make_entry_point(monkeypatch, ROWS[name])
    arguments = entry_point.row.build()
    for tensor in ("query", "out", "block_tables", "seq_lens"):
        arguments[tensor] = arguments[tensor][:0]

    assert [entry_point.outcome(arguments) for _ in range(4)] == [""] * 4


def test_another_plan_into_the_same_buffers_is_no_replay(monkeypatch: Patch) -> None:
    """A run depends on all that its plan declares, also where the metadata has the same address."""
    entry_point = make_entry_point(monkeypatch, ROWS["wrapper"])
    problem = PLANNED_CASE.build("cpu")
    given = plan_arguments(problem)
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    buffers = [given[name].clone() for name in names]
    wrapper = BatchMLAPagedAttentionWrapper(torch.zeros(1 << 20), True, *buffers)
    arguments = run_arguments(problem, out=torch.zeros_like(problem.query), wrapper=wrapper)
    for changes in ({}, {"enable_pdl": False}, {"use_sinks": True}, {"lse_mode": "base2"}, {}):
        wrapper.plan(**given | changes)
        expected = entry_point.uncached_outcome(arguments)

        assert [entry_point.outcome(arguments) for _ in range(3)] == [expected] * 3
