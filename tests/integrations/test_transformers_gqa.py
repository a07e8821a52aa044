"""GQA calls of the transformers integration, over stand-ins of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.errors import UnsupportedError
from tests.fixture_types import Log
from tests.integrations.transformers_cases import (
    BATCH,
    HEAD_DIM,
    LONG_PADDING,
    PADDING,
    assert_close,
    attend,
    expected,
    mask_of,
    qkv,
    seen_tokens,
)


@pytest.mark.parametrize(
    ("tokens", "padding", "pages"),
    [
        (64, None, "pages of 64 tokens"),
        (48, None, "pages of 16 tokens"),
        (53, None, "pages of one token"),
        (100, None, "pages of 64 tokens"),
        (64, PADDING, "pages of one token"),
        (100, PADDING, "pages of 64 tokens"),
        (100, LONG_PADDING, "pages of 64 tokens"),
    ],
    ids=[
        *("pages of 64", "pages of 16", "a short cache", "a cache of any length"),
        *("padded", "padded, any length", "padded, a full page"),
    ],
)
def test_a_step_is_served_in_place(
    integration: Any, tokens: int, padding: torch.Tensor | None, pages: str
) -> None:
    """A step equals attention in float64 over the tokens that it sees, NaNs elsewhere."""
    query, keys, values = qkv(tokens)
    seen = 21 if padding is None else padding.shape[1]
    sees = seen_tokens(tokens, padding, seen)
    wanted = expected(query, keys, values, sees)
    for cache in (keys, values):
        cache.masked_fill_(~sees.transpose(2, 3), torch.nan)
    mask = mask_of(integration, tokens, seen - 1, attention_mask=padding)

    assert_close(attend(integration, query, keys, values, mask), wanted)
    assert integration.package.explain() == {f"mlagen GQA, {pages}": 1}


@pytest.mark.parametrize("padding", [None, PADDING], ids=["plain", "padded"])
def test_a_step_compiles_into_one_graph(integration: Any, padding: torch.Tensor | None) -> None:
    """Compiled code keeps no record, and with a 2-D mask attends by sdpa to all that it allows."""

    def step(*inputs: torch.Tensor) -> Any:
        return attend(integration, *inputs, mask_of(integration, 64, attention_mask=padding))

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*qkv(64))

    assert integration.package.explain() == {}
    assert_close(got, expected(*qkv(64), seen_tokens(64, padding)))
    assert padding is not None or torch.equal(got, step(*qkv(64)))


def test_a_scale_is_that_of_the_head_dim_by_default(integration: Any) -> None:
    """Without ``scaling`` the scores have the usual factor."""
    inputs, mask = qkv(64), mask_of(integration, 64)

    outs = [attend(integration, *inputs, mask, scaling=each) for each in (None, HEAD_DIM**-0.5)]

    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q, k, v: (q.float(), k.float(), v.float()), "dtype torch.float32"),
        (lambda q, k, v: (q, k, v[..., :32]), "head dims"),
        (lambda q, k, v: (q[..., :40], k[..., :40], v[..., :40]), "head dim 40"),
        (lambda q, k, v: (q, *(x.mT.contiguous().mT for x in (k, v))), "contiguous"),
    ],
    ids=["fp32", "two head dims", "head dim", "strides"],
)
def test_bounds_serve_sdpa_too(integration: Any, caplog: Log, change: Any, reason: str) -> None:
    """A step that no kernel serves is computed by sdpa over the same tokens, with a warning."""
    inputs = change(*qkv(64))

    out = attend(integration, *inputs, mask_of(integration, 64, attention_mask=PADDING))

    assert_close(out, expected(*inputs, seen_tokens(64, PADDING)))
    (served,) = integration.package.explain()
    assert served.startswith("sdpa: ")
    assert reason in served
    assert [served in message for message in caplog.messages] == [True]


@pytest.mark.parametrize(("q_len", "reason"), [(3, "more than one query token"), (1, "a mask")])
def test_a_prompt_is_computed_by_sdpa(
    integration: Any, caplog: Log, q_len: int, reason: str
) -> None:
    """A call with a mask of sdpa keeps it, and no second warning follows that of the mask."""
    inputs = qkv(64, q_len=q_len)
    sees = seen_tokens(64).expand(-1, -1, q_len, -1)

    out = attend(integration, *inputs, sees)

    assert_close(out, expected(*inputs, sees))
    (served,) = integration.package.explain()
    assert reason in served
    assert caplog.messages == []


@pytest.mark.parametrize("is_step", [True, False], ids=["step", "prompt"])
def test_a_soft_cap_is_that_of_steps_and_of_prompts(integration: Any, is_step: bool) -> None:
    """A kernel caps the scores of a step, and torch those of a prompt, which sdpa refuses."""
    inputs = qkv(64, q_len=1 if is_step else 3)
    sees = seen_tokens(64).expand(-1, -1, inputs[0].shape[2], -1)
    mask = mask_of(integration, 64) if is_step else sees

    out = attend(integration, *inputs, mask, softcap=5.0)

    assert_close(out, expected(*inputs, sees, softcap=5.0))
    (served,) = integration.package.explain()
    assert served.startswith("mlagen GQA" if is_step else "eager, for its soft cap: more than one")


def test_a_capped_prompt_without_a_mask_is_causal(integration: Any) -> None:
    """Query tokens attend to the cache up to their own, as sdpa's do; a bias has no place there."""
    inputs = qkv(64, q_len=3)
    sees = torch.ones(1, 1, 3, 64, dtype=torch.bool).tril()

    out = attend(integration, *inputs, None, softcap=5.0)

    assert_close(out, expected(*inputs, sees, softcap=5.0))
    with pytest.raises(UnsupportedError, match="position_bias"):
        attend(integration, *inputs, None, softcap=5.0, position_bias=sees)


def test_an_indexer_without_use_mla_is_a_warning(integration: Any, caplog: Log) -> None:
    """Its tokens are computed by sdpa, which the mask cannot know."""
    chosen = torch.tensor([[[3, 5, 7]]]).expand(BATCH, 1, 3)
    sees = torch.zeros(BATCH, 1, 1, 64, dtype=torch.bool).index_fill_(-1, chosen[0, 0], value=True)

    out = attend(integration, *qkv(64), seen_tokens(64), indices=chosen)

    assert_close(out, expected(*qkv(64), sees))
    (message,) = caplog.messages
    assert "without use_mla" in message


def test_sinks_are_rejected(integration: Any) -> None:
    """A layer with sinks is not computed without them."""
    with pytest.raises(UnsupportedError, match="s_aux"):
        attend(integration, *qkv(64), None, s_aux=torch.zeros(8))
