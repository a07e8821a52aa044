"""MLA calls of the transformers integration, over stand-ins of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.errors import UnsupportedError
from tests.integrations.mla_layer import HEADS, LATENT, NOPE, ROPE, Layer, Model
from tests.integrations.transformers_cases import (
    BATCH,
    PADDING,
    assert_close,
    attend,
    expected,
    mask_of,
    qkv,
    random,
    seen_tokens,
)

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def absorbed_step(integration: Any, tokens: int = 64) -> tuple[Any, Inputs, Inputs]:
    """Return a layer that decodes by absorbed weights, a step's inputs, and those expanded."""
    model = Model()
    integration.package.use_mla(model)
    layer: Any = model.layers[1]
    query = random(BATCH, HEADS, 1, NOPE + ROPE)
    latents, rope = (random(BATCH, 1, tokens, width) for width in (LATENT, ROPE))
    return layer, (query, latents, rope), (query, *Layer.expand_kv(layer, latents, rope))


@pytest.mark.parametrize(
    ("padding", "tokens"),
    [(None, 64), (PADDING, 64), (PADDING, 100)],
    ids=["plain", "padded", "padded, any length"],
)
def test_an_absorbed_step_equals_expanded_attention(
    integration: Any, padding: torch.Tensor | None, tokens: int
) -> None:
    """A step over latents equals attention over the keys and values that they stand for."""
    layer, (query, *cached), expanded = absorbed_step(integration, tokens)
    kept = layer.expand_kv(*cached)
    mask = mask_of(integration, tokens, attention_mask=padding)

    out = attend(integration, query, *kept, mask, module=layer)

    assert kept == tuple(cached)
    assert_close(out, expected(*expanded, seen_tokens(tokens, padding)))
    (served,) = integration.package.explain()
    assert served.startswith("mlagen MLA, pages of ")


@pytest.mark.parametrize("tokens", [64, 37], ids=["static", "dynamic"])
def test_a_step_attends_to_the_tokens_of_the_indexer(integration: Any, tokens: int) -> None:
    """Only top-k tokens count, and of those only what the mask allows."""
    layer, inputs, expanded = absorbed_step(integration, tokens)
    sees = seen_tokens(tokens, PADDING)
    order = torch.rand(BATCH, tokens).add(sees[:, 0, 0].float()).argsort(descending=True)
    indices = order[:, None, :16].int()
    chosen = torch.zeros_like(sees).scatter_(-1, indices[:, None].long(), value=True)

    out = attend(integration, *inputs, sees, module=layer, indices=indices)

    assert int((chosen & sees).sum()) == 16 + 14  # of the second sequence there are no more
    assert_close(out, expected(*expanded, chosen & sees))
    assert integration.package.explain() == {"mlagen MLA, the top-k tokens of the indexer": 1}


def test_layers_of_a_step_share_what_its_mask_says(integration: Any) -> None:
    """Layers have the same counts of visible tokens, until the mask is written."""
    top_k_of, mask = integration.steps.top_k_of, seen_tokens(64, PADDING)
    known = top_k_of(mask, BATCH, 64, 16)

    assert top_k_of(mask, BATCH, 64, 16) is known
    assert (known.rows.flatten().tolist(), known.bounds[..., 1].flatten().tolist()) == (
        [0, 64],
        [16, 14],
    )
    mask[0] = False
    assert top_k_of(mask, BATCH, 64, 16).bounds[..., 1].flatten().tolist() == [0, 14]
    with torch.inference_mode():  # which counts no writes
        mask = seen_tokens(64)
        top_k_of(mask, BATCH, 64, 16)
        mask[0] = False
        assert top_k_of(mask, BATCH, 64, 16).bounds[0, 0, 0, 1] == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16], ids=str)
def test_a_prompt_expands_the_cache(integration: Any, dtype: torch.dtype) -> None:
    """Two query tokens go to sdpa, over the tokens of the indexer alone."""
    layer, (_, *cached), (_, *expanded) = absorbed_step(integration)
    query = random(BATCH, HEADS, 2, NOPE + ROPE)
    sees = seen_tokens(64).expand(-1, -1, 2, -1)
    indices = torch.arange(16, dtype=torch.int32).expand(BATCH, 2, 16)
    mask = sees if dtype == torch.bool else torch.zeros(sees.shape, dtype=dtype)
    mask = mask if dtype == torch.bool else mask.masked_fill(~sees, torch.finfo(dtype).min)

    out = attend(integration, query, *cached, mask, module=layer, indices=indices)

    assert_close(out, expected(query, *expanded, sees & (torch.arange(64) < 16)))


@torch.no_grad()
def test_a_step_without_gradients_has_heads_side_by_side(integration: Any) -> None:
    """The output projection reads the values of a step without a copy."""
    layer, inputs, expanded = absorbed_step(integration)

    out = attend(integration, *inputs, mask_of(integration, 64), module=layer)

    assert out.is_contiguous()
    assert_close(out, expected(*expanded, seen_tokens(64)))


def test_a_step_without_bounds_expands_the_cache(integration: Any) -> None:
    """A cache that grows has no mask, and its step goes to sdpa."""
    layer, inputs, expanded = absorbed_step(integration, 21)

    out = attend(integration, *inputs, None, module=layer)

    assert_close(out, expected(*expanded, seen_tokens(21)))
    assert integration.package.explain() == {"sdpa: latents": 1}


def test_indices_without_a_mask_reach_sdpa(integration: Any) -> None:
    """A model with an indexer that was not absorbed attends to its top-k tokens alone."""
    query, keys, values = qkv(64)
    indices = torch.arange(16, dtype=torch.int32).expand(BATCH, 1, 16)

    out = attend(integration, query, keys, values, None, indices=indices)

    assert_close(out, expected(query, keys, values, seen_tokens(64, seen=16)))


def test_another_implementation_restores_the_layers(integration: Any) -> None:
    """Layers expand the cache again once the implementation is another one."""
    layer, (_, *cached), _ = absorbed_step(integration)

    layer.config._attn_implementation = "sdpa"

    keys, _ = layer.expand_kv(*cached)
    assert keys.shape == (BATCH, HEADS, 64, NOPE + ROPE)


def test_a_model_that_no_kernel_serves_is_rejected(integration: Any) -> None:
    """No layer is changed unless all of them are served."""
    for change, message in (
        ({"kv_lora_rank": 256}, r"expected \(512, 64\) for absorbed decode, got \(256, 64\)"),
        ({"kv_b_proj": SimpleNamespace(weight=torch.zeros(2).to(torch.float8_e4m3fn))}, "16"),
    ):
        model = Model()
        del model.layers[1].kv_b_proj
        model.layers[1].__dict__.update({"kv_b_proj": torch.nn.Linear(2, 2)} | change)

        with pytest.raises(UnsupportedError, match=message):
            integration.package.use_mla(model)

        assert "expand_kv" not in vars(model.layers[0])
    with pytest.raises(UnsupportedError, match="expected layers with expand_kv"):
        integration.package.use_mla(torch.nn.Linear(2, 2))
