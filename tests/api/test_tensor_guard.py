"""What is alike, in one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mlagen.api import tensor_guard
from mlagen.api.tensor_guard import make_guard
from tests.api.launches import FACTS

guards = pytest.importorskip("torch._C._dynamo.guards")

UNLIKE: dict[str, Callable[[torch.Tensor], object]] = {
    **FACTS,
    "one axis more": lambda tensor: tensor[None],
    "the strides of an axis of size 1": lambda tensor: tensor.as_strided((4, 4, 1), (4, 1, 7)),
    "transposed": torch.t,
    "a device": lambda tensor: tensor.to("meta"),
    "a parameter": torch.nn.Parameter,
    "a subclass": lambda tensor: tensor.as_subclass(Named),
    "sparse": lambda tensor: tensor.to_sparse(),
    "none": lambda _: None,
    "a word": lambda _: "word",
}


class Named(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    tensor_guard._valid_guards.cache_clear()
    yield
    tensor_guard._valid_guards.cache_clear()


def test_tensors_that_are_alike() -> None:
    """Contents and addresses may differ, and which of two places a tensor has."""
    one, other = torch.ones(4, 4), torch.zeros(4, 4)

    guard = make_guard((one, other))

    assert guard is not None
    assert guard(one, other)
    assert guard(other, one)
    assert guard(torch.empty(5, 4)[1:], other)


@pytest.mark.parametrize("change", UNLIKE.values(), ids=UNLIKE)
@pytest.mark.parametrize("place", [0, 1])
def test_tensors_that_are_not(place: int, change: Callable[[torch.Tensor], object]) -> None:
    """Whatever is not the same of one of them, in whichever place."""
    tensors = [torch.ones(4, 4), torch.ones(4, 4)]
    guard = make_guard(tensors)
    assert guard is not None
    given: list[object] = [*tensors]
    given[place] = change(tensors[place])

    assert not guard(*given)


def test_a_tensor_that_is_resized() -> None:
    """The object is the same, and it is not like itself before."""
    one, other = torch.ones(4, 4), torch.ones(4, 4)
    guard = make_guard((one, other))
    assert guard is not None

    one.resize_(2, 4)

    assert not guard(one, other)


def test_a_tensor_in_two_places() -> None:
    """Another is like it in the same places; two tensors are not, and no guard sees one as two."""
    one, other, third = torch.ones(4), torch.zeros(4), torch.ones(3)
    guard, of_two = make_guard((one, third, one)), make_guard((one, third, other))
    assert guard is not None
    assert of_two is not None

    assert guard(other, torch.zeros(3), other)
    assert not guard(one, third, other)
    assert not guard(third, third, third)
    assert not guard(one, one, one)
    assert not of_two(one, third, one)


def test_a_subclass_is_not_guarded() -> None:
    """It may hide its shape."""
    assert make_guard((torch.ones(1), torch.ones(1).as_subclass(Named))) is None


def test_a_torch_without_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are none then."""
    monkeypatch.delattr(guards, "TensorGuards")

    assert make_guard((torch.ones(1), torch.zeros(1))) is None


class Rejecting:
    """Guards that are made in another way."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        """Take no sizes."""


class Yielding:
    """Guards that call everything alike."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Look at nothing."""

    def check(self, *_: object) -> bool:
        """Return that they are."""
        return True


class Blind(Yielding):
    """Guards that look at classes alone."""

    def check(self, *tensors: object) -> bool:
        """Return that they are, if they are tensors."""
        return all(isinstance(tensor, torch.Tensor) for tensor in tensors)


@pytest.mark.parametrize("other", [Rejecting, Yielding, Blind, object])
def test_a_torch_whose_guards_are_others(other: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are private, and not used where they do not tell apart what they did."""
    monkeypatch.setattr(guards, "TensorGuards", other)

    assert make_guard((torch.ones(1), torch.zeros(1))) is None
