"""The fp32 reference of the benchmark, against the float64 one of the tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tests.problems.reference
from cache_tools.benchmark.formats import dequantize
from cache_tools.benchmark.inputs import Inputs, make_inputs
from cache_tools.benchmark.reference import attend, relative_error
from cache_tools.benchmark.selection import case_of


def in_float64(inputs: Inputs) -> torch.Tensor:
    """Return the output of the first set, one query token and KV head at a time."""
    case = inputs.case
    group = case.heads // case.kv_heads
    keys = dequantize(case.kv_dtype, inputs.keys[0])
    values = dequantize(case.kv_dtype, inputs.values[0])[..., : case.head_dim_vo]
    out = torch.zeros(case.batch, case.q_len, case.heads, case.head_dim_vo, dtype=torch.float64)
    for request, seq_len in enumerate(case.seq_lens):
        slots = [divmod(token, case.page_size) for token in range(seq_len)]
        rows = [(int(inputs.block_tables[request, page]), slot) for page, slot in slots]
        for token in range(case.q_len):
            end = seq_len - case.q_len + token + 1
            start = 0 if case.window_left < 0 else max(0, end - 1 - case.window_left)
            seen = rows[start:end]
            if inputs.topk_indices is not None:
                listed = inputs.topk_indices[request, token].tolist()
                seen = [divmod(slot, case.page_size) for slot in listed]
            for head in range(case.kv_heads):
                heads = slice(head * group, (head + 1) * group)
                result = tests.problems.reference.attend(
                    inputs.queries[0][request, token, heads].float(),
                    torch.stack([keys[page, slot, head] for page, slot in seen]),
                    torch.stack([values[page, slot, head] for page, slot in seen]),
                    score_scale=inputs.scale,
                )
                out[request, token, heads] = result.out
    return out


@pytest.mark.parametrize(
    ("family", "facts"),
    [
        ("mla", {}),
        ("mla", {"q_len": 3, "kv_dtype": "e4m3"}),
        ("gqa", {"head_dim": 32, "q_len": 3}),
        ("gqa", {"head_dim": 32, "kv_heads": 4, "kv_dtype": "e4m3"}),
        ("mla", {"kv_dtype": "fp8_ds_mla", "top_k": 9, "q_len": 2, "is_ragged": False}),
        ("gqa", {"head_dim": 32, "window_left": 3, "q_len": 3, "kv_dtype": "int8"}),
        ("gqa", {"head_dim": 32, "window_left": 0, "kv_dtype": "nvfp4"}),
    ],
)
def test_it_is_attention_as_float64_computes_it(family: str, facts: dict[str, Any]) -> None:
    """The reference differs from float64 only by fp32 rounding."""
    facts = {"batch": 2, "seq_len": 20, "heads": 8, "page_size": 8, "is_ragged": True, **facts}
    inputs = make_inputs(case_of(family, **facts), 1, "cpu")

    expected = in_float64(inputs)

    assert relative_error(attend(inputs), expected) < 1e-6


def test_an_error_is_relative_to_the_norm() -> None:
    """Differences of 3 and 4 with a norm of 50 are an error of 0.1."""
    expected = torch.tensor([[30.0, 40.0], [0.0, 0.0]])

    assert relative_error(torch.tensor([30.0, 43.0, 4.0, 0.0]), expected) == pytest.approx(0.1)
