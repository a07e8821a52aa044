"""Tensor guards."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from mlagen.families.common import tensor_guard
from mlagen.families.common.tensor_guard import make_guard
from tests.families.entry_points import Named
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


def guards_with(check: Callable[..., bool]) -> type:
    """Return guards that ignore what they are made of."""

    def init(*_: object, **__: object) -> None:
        """Ignore all arguments."""

    return type("TensorGuards", (), {"__init__": init, "check": lambda _, *given: check(*given)})


OTHERS = {
    "another constructor": type("TensorGuards", (), {"__init__": lambda _, *__: None}),
    "accept everything": guards_with(lambda *_: True),
    "check types alone": guards_with(
        lambda *tensors: all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    ),
    "no check": object,
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_guards_with_other_behavior_are_not_used(other: type, monkeypatch: Patch) -> None:
    """Torch's private guards are used only if they distinguish tensors as required."""
    monkeypatch.setattr(guards, "TensorGuards", other)

    assert make_guard((torch.ones(1), torch.zeros(1))) is None
