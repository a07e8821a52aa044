"""Parts of inputs, by their classes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from mlagen.api.arg_parts import ArgPartsByType


class Inputs(NamedTuple):
    """Inputs of a call, with what the caller knows them by."""

    query: Any = torch.ones(1)
    max_len: Any = 70
    scale: Any = 0.5
    out: Any = None
    cache: Any = torch.zeros(2)
    factor: Any = 2.0
    is_causal: Any = True
    names: Any = ()


class Odd(int):
    """An int whose equality is its own."""


def test_each_part_is_taken_in_order() -> None:
    """The length is in none, for it is rounded first, and names are in none."""
    inputs = Inputs()

    parts = ArgPartsByType(1).find(inputs)

    assert parts is not None
    assert parts.tensors_of(inputs) == (inputs.query, inputs.cache)
    assert parts.floats_of(inputs) == (0.5, 2.0)
    assert parts.words_of(inputs) == (None, True)


def test_inputs_of_the_same_classes_have_the_same_parts() -> None:
    """Whatever the values; a tensor in place of a number, or a bool of an int, makes others."""
    found = ArgPartsByType(1)
    parts = found.find(Inputs())

    assert found.find(Inputs(max_len=3, scale=1.0, is_causal=False, names=1)) is not parts
    assert found.find(Inputs(max_len=3, scale=1.0, is_causal=False)) is parts
    others = [
        Inputs(out=torch.ones(1)),
        Inputs(is_causal=1),
        Inputs(query=torch.nn.Buffer(torch.ones(1))),
    ]
    assert [found.find(other) is parts for other in others] == [False, False, True]
    parameter = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    assert found.find(Inputs(query=parameter)) is not parts


@pytest.mark.parametrize(
    "changes",
    [
        {"is_causal": Odd(1)},
        {"out": [1]},
        {"max_len": 70.0},
        {"max_len": True},
        {"query": torch.ones(1).as_subclass(type("Named", (torch.Tensor,), {}))},
        {"scale": torch.ones(1)},
    ],
    ids=str,
)
def test_unusual_classes_have_no_parts(changes: dict[str, Any]) -> None:
    """A class may compare or hash as it likes; of one float there is no tuple."""
    found = ArgPartsByType(1)

    assert found.find(Inputs(**changes)) is None
    assert len(found) == 0
