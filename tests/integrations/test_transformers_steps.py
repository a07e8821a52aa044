"""Registration, masks and pages of the transformers integration, over stand-ins of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Log, Patch
from tests.integrations.transformers_cases import BATCH, PADDING, mask_of

ROWS, HEADS = 2, 3


def test_a_step_over_a_static_cache_has_bounds(integration: Any) -> None:
    """The mask is the first token and the number of tokens of each sequence."""
    mask = mask_of(integration, 64)

    assert mask.dtype == torch.int32
    assert mask.tolist() == [[[[0, 21]]]] * BATCH


def test_padding_on_the_left_moves_the_first_token(integration: Any) -> None:
    """Bounds begin behind the padding; more columns mark them, and a page that follows."""
    for tokens, marks in ((64, [1]), (70, [1]), (71, [1, 1])):
        mask = mask_of(integration, tokens, attention_mask=PADDING)
        assert mask.tolist() == [[[[0, 21, *marks]]], [[[7, 14, *marks]]]]
    full = mask_of(integration, 64, attention_mask=torch.ones_like(PADDING))
    assert full.shape[-1] == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"q_offset": 20}, "fixed length"),
        ({"kv_offset": 4}, "window"),
        ({"mask_function": max}, "not causal"),
        ({"config": SimpleNamespace(index_topk=8)}, "indexer"),
        ({"kv_length": 8}, "fewer than 16"),
        ({"attention_mask": PADDING.flip(1)}, "not left"),
        ({"attention_mask": PADDING, "q_offset": torch.tensor(30)}, "not left"),
    ],
    ids=lambda given: given.replace(" ", "-") if isinstance(given, str) else "",
)
def test_any_other_step_has_the_mask_of_sdpa(
    integration: Any, caplog: Log, options: dict[str, Any], reason: str
) -> None:
    """A step that no kernel serves has bools, and one warning says why and what would serve it."""
    for _ in range(3):
        mask = mask_of(integration, **{"tokens": 64} | options)

    assert mask.dtype == torch.bool
    ((served, count),) = integration.package.explain().items()
    assert reason in served
    assert count == 3
    if reason == "indexer":  # its layers gather tokens, by a kernel or not
        assert caplog.messages == []
    else:
        (message,) = caplog.messages
        assert all(each in message for each in (reason, "explain()", "static"))


def test_a_prompt_has_the_mask_of_sdpa(integration: Any) -> None:
    """More than one query token is no decode step."""
    mask = mask_of(integration, 64, q_length=3)

    assert mask.shape == (BATCH, 1, 3, 64)
    assert integration.package.explain() == {}


def test_a_model_that_adds_to_bounds_fails(integration: Any) -> None:
    """Bounds do not broadcast against scores."""
    for padding in (None, PADDING):
        with pytest.raises(RuntimeError, match="must match"):
            mask_of(integration, 64, attention_mask=padding) + torch.zeros(1, 8, 1, 64)


def test_the_names_are_registered(integration: Any) -> None:
    """Both implementations and the mask are there, once for any number of calls."""
    attentions, masks = integration.registries

    for _ in range(2):
        integration.package.register()

    assert set(attentions.entries) == {"paged|sdpa", "mlagen", "paged|mlagen"}
    assert set(masks.entries) == {"mlagen"}


@pytest.mark.parametrize("version", ["5.16.3", "5.18.0", "5.24.0", "5.170.0"])
def test_continuous_batching_of_another_version_is_left_alone(
    integration: Any, monkeypatch: Patch, version: str
) -> None:
    """A transformers with another paged cache, or with names of its own, gets no name for it."""
    attentions, _ = integration.registries
    monkeypatch.setattr(integration.continuous.transformers, "__version__", version)

    integration.package.register()

    assert set(attentions.entries) == {"paged|sdpa", "mlagen"}


def test_the_first_call_of_a_kind_is_logged(integration: Any, caplog: Log) -> None:
    """One line says what serves, and later calls are counted."""
    caplog.set_level("INFO", logger="mlagen")

    for _ in range(3):
        integration.steps.record("sdpa: a reason")

    assert caplog.messages == ["transformers: attention by sdpa: a reason"]
    assert integration.package.explain() == {"sdpa: a reason": 3}


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
