"""Cases over two pools: packed rows, lists, reference and call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tests.problems.reference
from cache_tools.benchmark.calls import mlagen_call
from cache_tools.benchmark.inputs import relative_error
from cache_tools.benchmark.pools import PoolInputs, expected_of, inputs_for
from cache_tools.benchmark.rows import values_of
from cache_tools.benchmark.selection import case_of
from mlagen.errors import ArgumentError
from mlagen.families.mla.write_rows import pack_pages
from mlagen.spec.dtype import EXTRA_ROW_FORMATS, ROW_FORMATS
from mlagen.spec.rows import RowFormat

ROWS = dict.fromkeys([*ROW_FORMATS.values(), *EXTRA_ROW_FORMATS.values()])
PLACED = [row for row in ROWS if row.scale_place != "tensor"]


def inputs_of(sets: int = 2, **facts: Any) -> PoolInputs:
    """Return small inputs, with pages of 16 tokens."""
    shared = {"batch": 2, "seq_len": 512, "heads": 3, "page_size": 16, "kv_dtype": "fp8_dsv4"}
    inputs = inputs_for(case_of("mla", **{**shared, **facts}), sets, "cpu")
    assert isinstance(inputs, PoolInputs)
    return inputs


@pytest.mark.parametrize("row", PLACED, ids=[f"{row.code}, {row.scale_place}" for row in PLACED])
def test_a_token_has_the_values_that_were_packed(row: RowFormat) -> None:
    """Codes err by half a step at most, bf16 elements by none, whatever the size of a group."""
    generator = torch.Generator().manual_seed(0)
    elements = row.scaled_elements + max(row.bf16_elements)
    sizes = torch.exp2(torch.randint(-2, 6, (3, 5, 1), generator=generator))
    numbers = (torch.randn(3, 5, elements, generator=generator) * sizes).bfloat16()
    cache = pack_pages(numbers, row)
    tokens = torch.randperm(15, generator=generator)
    wanted = numbers.flatten(0, 1)[tokens].float()
    values = values_of(cache, tokens, row)

    assert cache.shape == (3, 5, row.row_bytes(elements))
    assert torch.equal(values[:, row.scaled_elements :], wanted[:, row.scaled_elements :])
    groups, found = (x[:, : row.scaled_elements].view(15, -1, row.group) for x in (wanted, values))
    step = {"e4m3": 1 / 16, "e2m1": 0.178}[row.code] + (1e-6 if row.scale_code == "fp32" else 0)
    assert ((found - groups).abs() <= step * groups.abs().amax(-1, keepdim=True)).all()


def in_float64(inputs: PoolInputs) -> torch.Tensor:
    """Return the output of the first set, one query token at a time."""
    case = inputs.case
    pools = [(inputs.keys, inputs.swa, case.kv_dtype.row)]
    if inputs.extra:
        pools.append((inputs.extra_keys, inputs.extra, case.kv_dtype.extra_row))
    tokens = []
    for token in range(case.batch * case.q_len):
        rows = []
        for keys, lists, row in pools:
            assert row is not None
            listed = lists[0].indices[token][: lists[0].lengths[token]].long()
            cache = keys[0].data.squeeze(2)
            rows += [values_of(cache, entry.view(1), row) for entry in listed]
        seen = torch.cat(rows)
        query = inputs.queries[0].flatten(0, 1)[token].float()
        attended = tests.problems.reference.attend(query, seen, seen, score_scale=inputs.scale)
        tokens.append(attended.out)
    return torch.stack(tokens).view(inputs.queries[0].shape)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"top_k": 64, "is_ragged": True},
        {"top_k": 20, "q_len": 2},
        {"top_k": 4, "compress_ratio": 128, "q_len": 2, "page_size": 256},
        *({"kv_dtype": str(dtype), "top_k": 64} for dtype in EXTRA_ROW_FORMATS),
    ],
    ids=str,
)
def test_reference_and_call_are_attention_in_float64(facts: dict[str, Any]) -> None:
    """The reference differs by fp32 rounding; mlagen gives it for its set, and not for another."""
    inputs = inputs_of(**facts)
    expected, call = expected_of(inputs), mlagen_call(inputs)
    assert relative_error(expected, in_float64(inputs)) < 1e-6
    assert relative_error(call(0), expected) < 4e-3
    assert relative_error(call(1), expected) > 0.5


def test_a_query_token_lists_its_window_and_tokens_of_its_request() -> None:
    """Windows move by a token, chosen ones differ between query tokens, those of 128:1 do not."""
    inputs = inputs_of(q_len=2, top_k=40)
    (swa, again), (extra, _) = inputs.swa, inputs.extra
    windows = swa.indices.view(2, 2, 128)
    assert torch.equal(windows[:, 1], windows[:, 0] + 1)
    assert torch.equal(windows, windows[..., :1] + torch.arange(128, dtype=torch.int32))
    assert {*windows[0].flatten().tolist()} & {*windows[1].flatten().tolist()} == set()
    assert not torch.equal(swa.indices, again.indices)
    for request, listed in enumerate(extra.indices.view(2, 80)):
        tokens = set(listed.tolist())
        assert len(tokens) == 80
        assert tokens <= set(range(128 * request, 128 * (request + 1)))
        assert listed.tolist() != sorted(listed.tolist())
    (shared, _) = inputs_of(q_len=2, top_k=4, compress_ratio=128).extra
    assert shared.indices.tolist() == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
    assert all(each.indices.max() < 2 * 16 * 10 for each in inputs.swa)


@pytest.mark.parametrize(("ratio", "extra_page_size"), [(4, 64), (128, 2), (1, 64), (2, 32)])
def test_pages_of_the_second_pool_are_those_of_vllm(ratio: int, extra_page_size: int) -> None:
    """A KV block has 256 tokens of V4 and 64 of V4.1, and a page its compressed ones."""
    inputs = inputs_of(1, seq_len=1024, top_k=8, compress_ratio=ratio)
    (keys,), (extra,) = inputs.keys, inputs.extra_keys
    assert keys.data.shape[1:] == (16, 1, 584)
    assert extra.data.shape[1:] == (extra_page_size, 1, 584)
    assert keys.data.stride(0) % 576 == extra.data.stride(0) % 576 == 0
    assert inputs_of(1).extra_keys == []


NAMES = "fp8_dsv4, fp8_dsv41, fp8_dsv41_fp4_ca, fp8_dsv41_inline, fp8_dsv41_inline_fp4_ca"


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"compress_ratio": 3, "top_k": 8}, "compress_ratio: expected one of 4, 128, 1, 2, got 3"),
        (
            {"kv_dtype": "bf16", "compress_ratio": 4},
            f"compress_ratio: expected kv_dtype of {NAMES}, got bf16",
        ),
        ({"top_k": 129}, "top_k: expected at most 128 (seq_len over compress_ratio), got 129"),
        ({"seq_len": 100}, "seq_len: expected 128 or more, got 100"),
    ],
)
def test_a_case_that_no_model_has_is_rejected(facts: dict[str, Any], message: str) -> None:
    """The message names the option, its rule and the value."""
    with pytest.raises(ArgumentError) as caught:
        inputs_of(**facts)
    assert str(caught.value) == message
