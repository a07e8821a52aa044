"""Cases as calls of mlagen on the CPU backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cache_tools.benchmark.calls import mlagen_call
from cache_tools.benchmark.inputs import Inputs, make_inputs
from cache_tools.benchmark.reference import attend, relative_error
from cache_tools.benchmark.selection import case_of

CASES: list[tuple[str, dict[str, Any]]] = [
    ("mla", {}),
    ("mla", {"q_len": 3, "kv_dtype": "e4m3"}),
    ("mla", {"dtype": "fp16"}),
    ("gqa", {}),
    ("gqa", {"q_len": 3, "kv_dtype": "e4m3", "head_dim": 64}),
    ("gqa", {"q_len": 3, "window_left": 20}),
    ("gqa", {"kv_dtype": "int8"}),
    ("gqa", {"kv_dtype": "nvfp4"}),
    ("mla", {"top_k": 40, "q_len": 2, "is_ragged": False}),
    ("mla", {"top_k": 40, "kv_dtype": "fp8_ds_mla", "is_ragged": False}),
]


def args_of(family: str, facts: dict[str, Any]) -> Inputs:
    """Return two small input sets."""
    shared = {"batch": 3, "seq_len": 70, "heads": 8, "page_size": 16, "is_ragged": True}
    return make_inputs(case_of(family, **{**shared, **facts}), 2, "cpu")


@pytest.mark.parametrize(("family", "facts"), CASES, ids=str)
def test_mlagen_is_called_with_the_case(family: str, facts: dict[str, Any]) -> None:
    """The first set gives its reference, and the second another result."""
    inputs = args_of(family, facts)

    call = mlagen_call(inputs)

    expected = attend(inputs)
    assert relative_error(call(0), expected) < 4e-3
    assert relative_error(call(1), expected) > 0.5


def test_an_e4m3_query_gives_bf16() -> None:
    """The output buffer has the dtype of the call's output."""
    inputs = args_of("mla", {"dtype": "e4m3"})

    out = mlagen_call(inputs)(0)

    assert out.dtype is torch.bfloat16
    assert relative_error(out, attend(inputs)) < 5e-2


def test_a_token_too_few_is_found() -> None:
    """An output that misses one token of 70 is far above the error bound."""
    inputs = args_of("mla", {})
    inputs.seq_lens.sub_(1)

    error = relative_error(mlagen_call(inputs)(0), attend(inputs))

    assert error > 4 * inputs.case.error_bound
