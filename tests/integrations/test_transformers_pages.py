"""Pages of a static cache: which tokens they hold, and which layers share them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fixture_types import Patch

ROWS, HEADS = 2, 3


def bounds_of(first: int, count: int, columns: int = 2) -> torch.Tensor:
    """Return the bounds of sequences that see the same tokens."""
    return torch.tensor([first, count, 1, 1][:columns], dtype=torch.int32).repeat(ROWS, 1, 1, 1)


def tokens_of(pages: Any, tokens: int) -> list[list[int]]:
    """Return the tokens of a row of the cache that each row of the tables has, in their order."""
    cache = torch.arange(ROWS * HEADS * tokens).view(ROWS, HEADS, tokens, 1)
    slots, rows = pages.of(cache).squeeze(1)[..., 0], []
    for row, count in enumerate(pages.seq_lens.tolist()):
        used = pages.block_tables[row, : -(-count // pages.size)].long()
        rows.append((slots[used].flatten()[:count] - row * tokens).tolist())
    return rows


@pytest.mark.parametrize("tokens", [16, 53, 64, 65, 100, 128, 191])
@pytest.mark.parametrize("first", [0, 10])
def test_a_row_has_the_tokens_that_its_sequence_sees(
    integration: Any, tokens: int, first: int
) -> None:
    """Pages hold each seen token once, and lie in the cache, however few tokens or many."""
    pages_of = integration.steps.pages_of
    for count in range(1, tokens - first + 1):
        columns = (4 if first + 64 <= tokens else 3) if first else 2

        pages = pages_of(bounds_of(first, count, columns), tokens, HEADS)

        want = list(range(first, first + count))
        assert [sorted(row) for row in tokens_of(pages, tokens)] == [want] * (ROWS * HEADS)
        size = 16 if tokens == 16 and not first else 1
        assert pages.size == (64 if columns != 3 and tokens >= 64 else size)


def test_a_compiler_gets_pages_that_do_not_overlap(integration: Any, monkeypatch: Patch) -> None:
    """It may copy a view of the cache, and pages that overlap are many times the cache."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for tokens, size in ((100, 1), (96, 32), (128, 64)):
        pages = integration.steps.pages_of(bounds_of(0, 90), tokens, HEADS)
        assert (pages.size, pages.stride) == (size, size)


def test_layers_of_a_step_share_their_pages(integration: Any) -> None:
    """Tables are made once for the layers of each shape, until the bounds are written."""
    pages_of, bounds = integration.steps.pages_of, bounds_of(0, 70)
    with torch.inference_mode():
        assert pages_of(bounds_of(0, 70), 100, 1).seq_lens.tolist() == [70] * ROWS
    made = [pages_of(bounds, 100, heads) for heads in (HEADS, 1, HEADS, 1)]

    assert made[0] is made[2] is not made[1] is made[3]
    bounds[..., 1] += 1
    assert pages_of(bounds, 100, HEADS).seq_lens.tolist() == [71] * (ROWS * HEADS)


def test_a_tensor_of_another_class_keeps_nothing(integration: Any) -> None:
    """A fake tensor, whose tables are fake too, leaves none to a step."""

    class Other(torch.Tensor):
        """Stand-in for it."""

    bounds = bounds_of(0, 70).as_subclass(Other)
    made = [integration.steps.pages_of(bounds, 100, HEADS) for _ in range(2)]

    assert made[0] is not made[1]
