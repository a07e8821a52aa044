"""Input tensors of cases."""

from __future__ import annotations

import pytest
import torch

from cache_tools.benchmark.inputs import Inputs, make_inputs
from cache_tools.benchmark.selection import case_of


def args_of(family: str, sets: int = 2, **facts: object) -> Inputs:
    """Return small inputs, ragged, with pages of 16 tokens."""
    facts = {"batch": 3, "seq_len": 70, "heads": 8, "page_size": 16, **facts}
    return make_inputs(case_of(family, is_ragged=True, **facts), sets, "cpu")


def test_every_request_has_pages_of_its_own() -> None:
    """No two requests share a page, and pages are in random order."""
    inputs = args_of("mla")

    used = [
        int(page)
        for request, pages in enumerate(inputs.pages)
        for page in inputs.block_tables[request, :pages]
    ]
    assert inputs.pages == [7, 6, 4]  # of 105, 94 and 63 tokens
    assert sorted(used) == list(range(17))
    assert used != sorted(used)


@pytest.mark.parametrize(("page_size", "width"), [(16, 8), (64, 2), (1, 128), (256, 1)])
def test_tables_cover_a_multiple_of_128_tokens(page_size: int, width: int) -> None:
    """FlashInfer's XQA requires it."""
    assert args_of("gqa", page_size=page_size).block_tables.shape == (3, width)


def test_the_value_of_mla_is_part_of_its_key() -> None:
    """The value is a view of the key."""
    inputs = args_of("mla")

    assert inputs.values[0].shape == (17, 16, 1, 512)
    assert inputs.values[0].data_ptr() == inputs.keys[0].data_ptr()


def test_sets_differ_in_content_alone() -> None:
    """Sets have equal shapes and separate memory."""
    inputs = args_of("gqa", dtype="fp16", kv_dtype="e4m3", head_dim=64)

    for one, other in (inputs.queries, inputs.keys, inputs.values):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert not torch.equal(one.float(), other.float())
    assert (inputs.queries[0].dtype, inputs.keys[0].dtype) == (torch.float16, torch.float8_e4m3fn)
    assert not torch.equal(inputs.keys[0].float(), inputs.values[0].float())


def test_the_same_case_has_the_same_inputs() -> None:
    """An error is reproducible."""
    assert torch.equal(args_of("mla").keys[1], args_of("mla").keys[1])
