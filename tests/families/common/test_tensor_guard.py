"""Tensor guards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mlagen.families.common import tensor_guard
from mlagen.families.common.tensor_guard import make_guard
from tests.families.launches import PROPERTIES
from tests.fixture_types import Patch

guards = pytest.importorskip("torch._C._dynamo.guards")

UNLIKE: dict[str, Callable[[torch.Tensor], object]] = {
    **PROPERTIES,
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
    """A subclass of torch.Tensor."""


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    tensor_guard._valid_guards.cache_clear()
    yield
    tensor_guard._valid_guards.cache_clear()


@pytest.mark.parametrize("change", UNLIKE.values(), ids=UNLIKE)
@pytest.mark.parametrize("place", [0, 1])
def test_different_metadata_is_rejected(
    place: int, change: Callable[[torch.Tensor], object]
) -> None:
    """A difference in one tensor at any position is rejected."""
    tensors = [torch.ones(4, 4), torch.ones(4, 4)]
    guard = make_guard(tensors)
    assert guard is not None
    given: list[object] = [*tensors]
    given[place] = change(tensors[place])

    assert not guard(*given)


def test_a_subclass_is_not_guarded() -> None:
    """A subclass has no guard, as it may override its shape."""
    assert make_guard((torch.ones(1), torch.ones(1).as_subclass(Named))) is None


def test_a_torch_without_guards(monkeypatch: Patch) -> None:
    """Without torch's guards there is no guard."""
    monkeypatch.delattr(guards, "TensorGuards")

    assert make_guard((torch.ones(1), torch.zeros(1))) is None


class Rejecting:
    """Guards with another constructor."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        """Accept no sizes."""


class AcceptAll:
    """Guards that accept everything."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Ignore all arguments."""

    def check(self, *_: object) -> bool:
        """Accept."""
        return True


class TypesOnly(AcceptAll):
    """Guards that check types alone."""

    def check(self, *tensors: object) -> bool:
        """Accept tensors."""
        return all(isinstance(tensor, torch.Tensor) for tensor in tensors)


@pytest.mark.parametrize("other", [Rejecting, AcceptAll, TypesOnly, object])
def test_guards_with_other_behaviour_are_not_used(other: type, monkeypatch: Patch) -> None:
    """Torch's private guards are used only if they distinguish tensors as required."""
    monkeypatch.setattr(guards, "TensorGuards", other)

    assert make_guard((torch.ones(1), torch.zeros(1))) is None
