"""Registration and masks of the transformers integration, over stand-ins of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Log, Patch
from tests.integrations.transformers_cases import BATCH, PADDING, mask_of


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
