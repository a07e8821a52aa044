"""Argument parts by argument types."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from mlagen.families.common.arg_parts import ArgPartsByType


class Inputs(NamedTuple):
    """Arguments of a call, with their names last."""

    query: Any = torch.ones(1)
    max_len: Any = 70
    scale: Any = 0.5
    out: Any = None
    cache: Any = torch.zeros(2)
    factor: Any = 2.0
    is_causal: Any = True
    names: Any = ()


class Odd(int):
    """A subclass of int with its own equality."""


def test_each_part_is_in_argument_order() -> None:
    """Each part has its arguments in order; the length and the names are in none."""
    inputs = Inputs()

    parts = ArgPartsByType(1).find(inputs)

    assert parts is not None
    assert parts.tensors_of(inputs) == (inputs.query, inputs.cache)
    assert parts.floats_of(inputs) == (0.5, 2.0)
    assert parts.key_values_of(inputs) == (None, True)


def test_arguments_of_the_same_types_have_the_same_parts() -> None:
    """The parts depend on the types alone: another type of one argument has other parts."""
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
def test_other_types_have_no_parts(changes: dict[str, Any]) -> None:
    """Arguments with a type of unknown equality, or too few of a part, have no parts."""
    found = ArgPartsByType(1)

    assert found.find(Inputs(**changes)) is None
    assert len(found) == 0
