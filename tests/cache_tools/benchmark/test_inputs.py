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
    """The values of MLA are its keys."""
    inputs = args_of("mla")

    assert inputs.keys[0].data.shape == (17, 16, 1, 576)
    assert inputs.values[0] is inputs.keys[0]


def test_sets_differ_in_content_alone() -> None:
    """Sets have equal shapes and separate memory."""
    inputs = args_of("gqa", dtype="fp16", kv_dtype="e4m3", head_dim=64)

    keys, values = ([each.data for each in stored] for stored in (inputs.keys, inputs.values))
    for one, other in (inputs.queries, keys, values):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert not torch.equal(one.float(), other.float())
    assert (inputs.queries[0].dtype, keys[0].dtype) == (torch.float16, torch.float8_e4m3fn)
    assert not torch.equal(keys[0].float(), values[0].float())


def test_the_same_case_has_the_same_inputs() -> None:
    """An error is reproducible."""
    assert torch.equal(args_of("mla").keys[1].data, args_of("mla").keys[1].data)


def test_indices_are_slots_of_the_request() -> None:
    """A query token has distinct tokens, all in pages of its own request."""
    case = case_of("mla", batch=3, seq_len=40, q_len=2, top_k=30, page_size=16)

    inputs = make_inputs(case, 1, "cpu")

    assert inputs.topk_indices is not None
    assert inputs.topk_indices.shape == (3, 2, 30)
    for request, lists in enumerate(inputs.topk_indices):
        pages = set(inputs.block_tables[request, :3].tolist())
        for slots in lists:
            assert len(set(slots.tolist())) == 30
            assert set((slots // 16).tolist()) == pages
