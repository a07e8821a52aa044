"""Tensors without memory are rejected on the CPU, and no tensor guard accepts them."""

from __future__ import annotations

import pytest
import torch

from mlagen.families.common.tensor_guard import make_guard
from tests.families.entry_points import ROWS, make_entry_point
from tests.memory_semantics import KINDS, MemorySemantics


class TestOnTheCpu(MemorySemantics):
    """Rejection of tensors without memory, without a GPU."""

    device = "cpu"


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"without storage"}))
def test_no_guard_accepts_it(kind: str) -> None:
    """The fast path never receives a tensor without memory."""
    tensors = (torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(4))
    guard = make_guard(tensors)
    assert guard is not None
    assert guard(*tensors)

    is_taken = guard(KINDS[kind](tensors[0]), tensors[1])

    assert not is_taken


def test_a_guard_checks_requires_grad() -> None:
    """A guard rejects a tensor that requires grad while grad is recorded."""
    plain, trained = torch.ones(2), torch.ones(2).requires_grad_()
    of_plain = make_guard((plain,))
    assert of_plain is not None
    assert not of_plain(trained)
    with torch.no_grad():
        guard = make_guard((trained,))
    assert guard is not None

    assert not guard(trained)
    with torch.no_grad():
        assert guard(trained)


def test_a_tensor_without_an_address_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of vmap, or a sparse one, is rejected by its check, not by torch's data_ptr."""
    entry_point = make_entry_point(monkeypatch, ROWS["trtllm"])
    arguments = entry_point.row.build()
    entry_point.call(arguments)

    def launched(batched: torch.Tensor) -> torch.Tensor:
        outcome = entry_point.outcome(arguments | {"query": batched})
        assert "query: expected a dense tensor in memory, got a batched tensor" in outcome
        return batched

    torch.func.vmap(launched)(arguments["query"][None])
    sparse = entry_point.outcome(arguments | {"query": arguments["query"].to_sparse()})
    assert "query: expected a dense tensor in memory, got a sparse tensor" in sparse


@pytest.mark.parametrize("kind", KINDS)
def test_a_cached_call_rejects_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signature does not distinguish it from a tensor in memory, so every such call checks."""
    entry_point = make_entry_point(monkeypatch, ROWS["trtllm"])
    arguments = entry_point.row.build()
    for _ in range(3):
        entry_point.call(arguments)

    outcome = entry_point.outcome(arguments | {"kv_cache": KINDS[kind](arguments["kv_cache"])})

    assert outcome.startswith("ArgumentError: kv_cache: expected a dense tensor in memory")
