"""Merges of attention states, and what they reject."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.cascade import merge_state_in_place
from tests.cascade_semantics import CascadeSemantics
from tests.problems.problem import bf16
from tests.rejected import rejections, rejects


class TestCascade(CascadeSemantics):
    """Merges, on the device of the fixture."""


V, S = bf16(3, 4, 64), torch.zeros(3, 4)


@rejections(
    [
        ("v", V.double(), ".dtype: expected torch.bfloat16 or torch.float16 or torch.float32, ..."),
        ("v", V[0], ".ndim: expected 3, got 2"),
        ("s", S.half(), ".dtype: expected torch.float32, got torch.float16"),
        ("s", S[:2], ".shape: expected [3, 4] (rows of v), got [2, 4]"),
        ("v_other", V.half(), ".dtype: expected torch.bfloat16 (dtype of v), got torch.float16"),
        ("v_other", V[:, :2], ".shape: expected [3, 4, 64] (v), got [3, 2, 64]"),
        ("s_other", S.int(), ".dtype: expected torch.float32 or torch.bfloat16 or ..."),
        ("v_other", V, ": expected other memory than the state's, got the same"),
        ("s_other", S, ": expected other memory than the state's, got the same"),
        ("mask", torch.ones(3), ".dtype: expected torch.bool or torch.uint8, got torch.float32"),
        ("mask", torch.ones(2, dtype=torch.bool), ".shape: expected [3] (n), got [2]"),
        ("base", "10", ": expected one of base2, basee, got '10'"),
        ("v_other", None, ": expected a torch.Tensor, got NoneType"),
    ]
)
def test_a_merge_is_rejected(changes: dict[str, Any], message: str) -> None:
    """The message has argument, rule and value."""
    given: dict[str, Any] = {"v": V, "s": S, "v_other": V.clone(), "s_other": S.clone()}

    with rejects(message):
        merge_state_in_place(**given | changes)
