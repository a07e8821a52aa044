"""Pages of a static cache: which tokens they hold, and the memory of their tables."""

from __future__ import annotations

from threading import Thread
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
    pages_of = integration.pages.pages_of
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
        pages = integration.pages.pages_of(bounds_of(0, 90), tokens, HEADS)
        assert (pages.size, pages.stride) == (size, size)


@pytest.mark.parametrize("tokens", [100, 128], ids=["overlap", "aligned"])
def test_steps_have_their_tables_in_the_same_memory(integration: Any, tokens: int) -> None:
    """A launch is replayed by its addresses, and layers of two steps may take turns."""
    first, second = bounds_of(0, 70), bounds_of(0, 99)
    addresses = set()

    for bounds, count in ((first, 70), (second, 99), (first, 70), (first, 70)):
        pages = integration.pages.pages_of(bounds, tokens, HEADS)
        addresses.add((pages.block_tables.data_ptr(), pages.seq_lens.data_ptr()))
        assert sorted(tokens_of(pages, tokens)[-1]) == list(range(count))

    assert len(addresses) == 1


def test_a_thread_has_memory_of_its_own(integration: Any) -> None:
    """Steps of two threads do not write over each other's tables."""
    made: list[Any] = []

    def step() -> None:
        made.append(integration.pages.pages_of(bounds_of(0, 70), 100, HEADS))

    step()
    thread = Thread(target=step)
    thread.start()
    thread.join()

    assert made[0].seq_lens.data_ptr() != made[1].seq_lens.data_ptr()


def test_inference_mode_has_memory_of_its_own(integration: Any) -> None:
    """Outside of inference mode torch rejects a write to a tensor that was made in it."""
    for count in (70, 71, 72):
        with torch.inference_mode(count == 70):
            pages = integration.pages.pages_of(bounds_of(0, count), 100, HEADS)
        assert pages.seq_lens.tolist() == [count] * (ROWS * HEADS)


def test_a_tensor_of_another_class_has_memory_of_its_own(integration: Any) -> None:
    """A fake tensor, whose tables are fake too, leaves none to a step."""

    class Other(torch.Tensor):
        """Stand-in for it."""

    pages = integration.pages.pages_of(bounds_of(0, 70).as_subclass(Other), 100, HEADS)

    assert pages.seq_lens.tolist() == [70] * (ROWS * HEADS)
    assert not integration.pages._kept.pages


def test_few_shapes_are_kept(integration: Any, monkeypatch: Patch) -> None:
    """Caches of ever other lengths do not collect memory."""
    monkeypatch.setattr(integration.pages, "_MAX_KEPT", 2)
    for tokens in range(64, 80):
        integration.pages.pages_of(bounds_of(0, 60), tokens, HEADS)
        assert len(integration.pages._kept.pages) <= 2
