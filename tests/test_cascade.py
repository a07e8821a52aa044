"""Merges of attention states, and what they reject."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.cascade import merge_state_in_place
from mlagen.errors import ArgumentError
from tests.cascade_semantics import CascadeSemantics


class TestCascade(CascadeSemantics):
    """Merges, on the device of the fixture."""


V, S = torch.zeros(3, 4, 64, dtype=torch.bfloat16), torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": V.double()}, "v.dtype: expected torch.bfloat16 or torch.float16 or torch.float32"),
        ({"v": V[0]}, "v.ndim: expected 3, got 2"),
        ({"s": S.half()}, "s.dtype: expected torch.float32, got torch.float16"),
        ({"s": S[:2]}, "s.shape: expected [3, 4] (rows of v), got [2, 4]"),
        ({"v_other": V.half()}, "v_other.dtype: expected torch.bfloat16 (dtype of v), got"),
        ({"v_other": V[:, :2]}, "v_other.shape: expected [3, 4, 64] (v), got [3, 2, 64]"),
        ({"s_other": S.int()}, "s_other.dtype: expected torch.float32 or"),
        ({"v_other": V}, "v_other: expected other memory than the state's, got the same"),
        ({"s_other": S}, "s_other: expected other memory than the state's, got the same"),
        ({"mask": torch.ones(3)}, "mask.dtype: expected torch.bool or torch.uint8"),
        ({"mask": torch.ones(2, dtype=torch.bool)}, "mask.shape: expected [3] (n), got [2]"),
        ({"base": "10"}, "base: expected one of base2, basee, got '10'"),
        ({"v_other": None}, "v_other: expected a torch.Tensor, got NoneType"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_a_merge_is_rejected(changes: dict[str, Any], message: str) -> None:
    """The message has the argument, the rule and the value."""
    given: dict[str, Any] = {"v": V, "s": S, "v_other": V.clone(), "s_other": S.clone()}

    with pytest.raises(ArgumentError) as caught:
        merge_state_in_place(**given | changes)

    assert str(caught.value).startswith(message)
