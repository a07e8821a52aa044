"""Pages of the KV blocks of servers."""

from __future__ import annotations

import pytest

from mlagen.models.pages import PAGE_SIZES, page_size_of, served_page_sizes
from mlagen.spec.gqa.variant import PAGE_SIZES as GQA_PAGE_SIZES
from mlagen.spec.mla.variant import PAGE_SIZES as MLA_PAGE_SIZES


@pytest.mark.parametrize(
    ("block_size", "page_size"),
    [(16, 16), (32, 32), (64, 64), (128, 64), (1152, 64), (528, 16), (544, 32), (800, 32), (1, 1)],
)
def test_a_block_is_split_into_the_largest_pages(block_size: int, page_size: int) -> None:
    """An inflated block of a hybrid model has pages of at most 64 tokens, without a remainder."""
    assert page_size_of(block_size) == page_size
    assert block_size % page_size == 0


@pytest.mark.parametrize("is_mla", [False, True])
def test_pages_of_hybrid_models_are_prewarmed(is_mla: bool) -> None:
    """Blocks of hybrid models are multiples of 128 with MLA, and of 16 with GQA."""
    step = 128 if is_mla else 16
    pages = {page_size_of(step * count) for count in range(1, 100)}
    assert pages == set(served_page_sizes(is_mla=is_mla, is_hybrid=True))
    assert set(served_page_sizes(is_mla=is_mla, is_hybrid=False)) <= pages
    assert set(PAGE_SIZES) <= set(MLA_PAGE_SIZES) & set(GQA_PAGE_SIZES)
