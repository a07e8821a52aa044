"""Tensors without memory are rejected on the CPU, and no tensor guard accepts them."""

from __future__ import annotations

import pytest
import torch

from mlagen.families.common.call_cache import CallCache, FastPathKey
from mlagen.families.common.tensor_guard import make_guard
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


def test_a_tensor_without_an_address_is_not_replayed() -> None:
    """The replay falls back instead of raising torch's error for data_ptr."""
    calls: CallCache[str] = CallCache()
    tensors = (torch.ones(2),)
    calls.store("signature", "call", FastPathKey("key", tensors, None))

    def launched(batched: torch.Tensor) -> torch.Tensor:
        assert not calls.replay("key", (batched,), (1.0,), enable_pdl=True)
        return batched

    torch.func.vmap(launched)(torch.ones(3, 2))
    assert not calls.replay("key", (torch.eye(2).to_sparse(),), (1.0,), enable_pdl=True)


def test_a_cached_call_keeps_a_tensor_guard() -> None:
    """A cached signature is valid for tensors that its guard accepts."""
    calls: CallCache[str] = CallCache()
    tensors = (torch.ones(2, 3), torch.ones(4))

    def is_valid(*tensors: torch.Tensor) -> bool:
        return calls.is_valid("signature", FastPathKey("key", tensors, None))

    assert not is_valid(*tensors)
    calls.store("signature", "call", FastPathKey("key", tensors, None))

    assert is_valid(torch.zeros(2, 3), torch.zeros(4))
    assert not calls.is_valid("signature", None)
    assert not calls.is_valid("signature", FastPathKey("another key", tensors, None))
    for made in KINDS.values():
        assert not is_valid(made(tensors[0]), tensors[1])
    calls.clear()
    assert not is_valid(*tensors)
