"""What has no memory is rejected, on the CPU; and no guard of torch takes it for a plain tensor."""

from __future__ import annotations

import pytest
import torch

from mlagen.api.call_cache import CallCache, FastPathKey
from mlagen.api.tensor_guard import make_guard
from tests.memory_semantics import KINDS, MemorySemantics


class TestOnTheCpu(MemorySemantics):
    """Every promise, without a GPU."""

    device = "cpu"


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"without storage"}))
def test_no_guard_takes_it_for_a_plain_tensor(kind: str) -> None:
    """The short way of usual calls never sees a tensor without memory."""
    tensors = (torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(4))
    guard = make_guard(tensors)
    assert guard is not None
    assert guard(*tensors)

    is_taken = guard(KINDS[kind](tensors[0]), tensors[1])

    assert not is_taken


def test_no_guard_takes_a_tensor_that_requires_grad_for_another() -> None:
    """Made without grad mode or with another tensor, a guard denies it where grad is recorded."""
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


def test_a_tensor_without_an_address_is_not_launched_again() -> None:
    """Asked for where it begins, it leaves the short way instead of raising torch's own error."""
    calls: CallCache[str] = CallCache()
    tensors = (torch.ones(2),)
    calls.keep("form", "call", FastPathKey("key", tensors, None))

    def launched(batched: torch.Tensor) -> torch.Tensor:
        assert not calls.replay("key", (batched,), (1.0,), enable_pdl=True)
        return batched

    torch.func.vmap(launched)(torch.ones(3, 2))
    assert not calls.replay("key", (torch.eye(2).to_sparse(),), (1.0,), enable_pdl=True)


def test_the_tensors_of_a_form_are_known_by_a_guard() -> None:
    """A call that is found by its form is sound for tensors like those that were checked."""
    calls: CallCache[str] = CallCache()
    tensors = (torch.ones(2, 3), torch.ones(4))

    def is_valid(*tensors: torch.Tensor) -> bool:
        return calls.is_valid("form", FastPathKey("key", tensors, None))

    assert not is_valid(*tensors)
    calls.keep("form", "call", FastPathKey("key", tensors, None))

    assert is_valid(torch.zeros(2, 3), torch.zeros(4))
    assert not calls.is_valid("form", None)
    assert not calls.is_valid("form", FastPathKey("another key", tensors, None))
    for made in KINDS.values():
        assert not is_valid(made(tensors[0]), tensors[1])
    calls.clear()
    assert not is_valid(*tensors)
