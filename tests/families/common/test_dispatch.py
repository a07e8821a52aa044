"""What is cached of calls: replays, and launchers with the guards of their tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.families.common import dispatch, tensor_guard
from mlagen.mla import BatchMLAPagedAttentionWrapper
from tests.families.entry_points import ROWS, EntryPoint, make_entry_point
from tests.families.launches import Launches, args_of, launched
from tests.families.planned_runs import PLANNED_CASE
from tests.families.rejections import changed
from tests.fixture_types import Patch
from tests.problems.batch_mla import plan_arguments, run_arguments
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase

ARGS = {
    "mla": args_of(MlaCase(seq_lens=(70, 3), heads=16, with_sinks=True)),
    "gqa": args_of(GqaCase(seq_lens=(70, 3), q_len=2, mask="random", sink=3.0, window=50)),
}
# Numbers that the kernels get at each launch.
NUMBERS = {
    "mla": ("bmm1_scale", "bmm2_scale", "latent_scale", "rope_scale"),
    "gqa": ("bmm1_scale", "bmm2_scale", "out_16bit_factor"),
}


def fields(of: str) -> list[tuple[str, str]]:
    """Return each family with each of the fields that are tensors, or that are not."""
    return [
        (family, name)
        for family, args in ARGS.items()
        for name in args._fields
        if (isinstance(getattr(args, name), torch.Tensor)) is (of == "tensors")
    ]


@pytest.mark.parametrize(("family", "name"), fields("others"))
def test_a_launcher_takes_no_call_with_another_argument(
    family: str, name: str, launches: Launches
) -> None:
    """Whatever is no tensor is a fact of a launcher; a number only whether it is 1."""
    args = ARGS[family]
    launcher = launched(args, launches).call
    number, other = object(), args._replace(**{name: object()})

    if name in {"max_seq_len", "computed"}:
        other = args._replace(**{name: None})
        assert launcher.fixed_of(other) == launcher.fixed_of(args)
    elif name in NUMBERS[family]:
        facts = [launcher.fixed_of(args._replace(**{name: one})) for one in (0.5, 0.25, 1.0)]
        assert facts[0] == facts[1] != facts[2]
    else:
        assert launcher.fixed_of(other) != launcher.fixed_of(args)
    assert number not in launcher.fixed_of(args)


@pytest.mark.parametrize(("family", "name"), fields("tensors"))
def test_tensors_are_no_facts(family: str, name: str, launches: Launches) -> None:
    """A guard checks them."""
    args = ARGS[family]
    launcher = launched(args, launches).call
    other = args._replace(**{name: torch.ones(3)})

    assert launcher.fixed_of(other) == launcher.fixed_of(args)


def test_a_bias_must_cover_the_length_exactly(launches: Launches) -> None:
    """With a bias the length is a fact."""
    args = args_of(MlaCase(seq_lens=(70, 3), bias="for each head"))
    launcher = launched(args, launches).call

    longer = args._replace(max_seq_len=args.max_seq_len + 1)
    assert launcher.fixed_of(longer) != launcher.fixed_of(args)


def test_the_cache_has_a_capacity(monkeypatch: Patch) -> None:
    """Full tables drop their oldest entries, and a key has a few launchers."""
    for name, limit in (("_MAX_KEYS", 3), ("_MAX_LAUNCHES", 3), ("_MAX_LAUNCHERS_PER_KEY", 2)):
        monkeypatch.setattr(dispatch, name, limit)
    entry_point = make_entry_point(monkeypatch, ROWS["trtllm"])
    calls, arguments = entry_point.row.calls, entry_point.row.build()
    table = arguments["block_tables"]
    strided = [torch.zeros(2, table.shape[1] + more, dtype=torch.int32) for more in range(1, 5)]

    for each in strided:
        entry_point.call(arguments | {"block_tables": each[:, : table.shape[1]]})
    (entries,) = calls._guarded.values()
    assert len(entries) == 2
    for heads in range(1, 9):
        query = torch.zeros(2, 1, heads, 576, dtype=torch.bfloat16)
        entry_point.call(arguments | {"query": query, "out": None})
        assert max(len(calls._guarded), len(calls._replays)) <= 3
    calls.clear()
    assert not calls._guarded
    assert not calls._replays


def count_guards(monkeypatch: Patch) -> list[object]:
    """Return a list that grows with each attempt to make a guard."""
    attempts: list[object] = []

    def count(tensors: tuple[torch.Tensor, ...]) -> Any:
        attempts.append(len(tensors))
        return tensor_guard.make_guard(tensors)

    monkeypatch.setattr(dispatch, "make_guard", count)
    return attempts


def test_alternating_kinds_of_tensors_have_a_guard_each(
    entry_point: EntryPoint, monkeypatch: Patch
) -> None:
    """Inference and normal tensors with one shape have one guard each."""
    attempts = count_guards(monkeypatch)
    arguments = entry_point.row.build()
    with torch.inference_mode():
        inference = changed(arguments, entry_point.row.tensors.split()[0], torch.clone)
    calls = (arguments, inference)
    expected = [entry_point.uncached_outcome(call) for call in calls]
    attempts.clear()
    entry_point.plans.clear()

    outcomes = [[entry_point.outcome(call) for call in calls] for _ in range(9)]

    assert outcomes == [expected] * 9
    assert len(attempts) == len(entry_point.plans) == 2


def test_alternating_shapes_have_a_launcher_each(monkeypatch: Patch) -> None:
    """A server whose batches alternate plans each once."""
    attempts = count_guards(monkeypatch)
    entry_point = make_entry_point(monkeypatch, ROWS["trtllm"])
    arguments, table = entry_point.row.build(), torch.zeros(2, 40, dtype=torch.int32)

    for _ in range(3):
        for width in range(1, 20):
            entry_point.call(arguments | {"block_tables": table[:, :-width].clone()})

    assert len(attempts) == len(entry_point.plans) == 19


def test_without_torch_guards_calls_are_planned_again(
    entry_point: EntryPoint, monkeypatch: Patch
) -> None:
    """A torch without guards has the same results, and caches nothing."""
    monkeypatch.setattr(tensor_guard, "_valid_guards", lambda: None)
    arguments = entry_point.row.build()
    expected = entry_point.uncached_outcome(arguments)

    outcomes = [entry_point.outcome(arguments) for _ in range(3)]

    assert outcomes == [expected] * 3
    assert entry_point.is_planned(arguments)


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
    assert not entry_point.is_planned(repeated)
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
