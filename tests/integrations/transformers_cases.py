"""Inputs of single calls, and attention in float64 over what a step sees."""

from __future__ import annotations

from typing import Any

import torch

BATCH, KV_HEADS, GROUP, HEAD_DIM = 2, 2, 4, 64
SCALE = 0.2
MODULE = torch.nn.Module()
PADDING = torch.ones(BATCH, 21, dtype=torch.bool)
PADDING[1, :7] = False
LONG_PADDING = torch.ones(BATCH, 98, dtype=torch.bool)
LONG_PADDING[1, :30] = False


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a tensor of a fixed seed for each shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def qkv(tokens: int, q_len: int = 1, **options: Any) -> list[torch.Tensor]:
    """Return query, keys and values of a static cache."""
    heads = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
    lengths = (q_len, tokens, tokens)
    return [
        random(BATCH, head, length, HEAD_DIM, **options) + index
        for index, (head, length) in enumerate(zip(heads, lengths, strict=True))
    ]


def mask_of(integration: Any, tokens: int, seen: int = 20, **options: Any) -> Any:
    """Return the mask of a decode step behind ``seen`` tokens of a static cache."""
    given = {"batch_size": BATCH, "q_length": 1, "kv_length": tokens, "device": "cpu"}
    given |= {
        "q_offset": torch.tensor(seen),
        "mask_function": integration.steps.causal_mask_function,
    }
    return integration.steps.decode_mask(**given | options)


def attend(integration: Any, *inputs: Any, module: Any = MODULE, **options: Any) -> Any:
    """Return the output of a call with query, keys, values and a mask."""
    out, weights = integration.attention.attention(module, *inputs, **{"scaling": SCALE} | options)
    assert weights is None
    return out.detach()


def expected(*inputs: torch.Tensor, softcap: float | None = None) -> torch.Tensor:
    """Return attention in float64 to what is seen, ``[batch, q_len, heads, head_dim]``."""
    query, keys, values, sees = inputs
    group = query.shape[1] // keys.shape[1]
    query, keys, values = (each.double() for each in (query, keys, values))
    keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
    scores = query @ keys.transpose(2, 3) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~sees, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(1, 2).detach()


def seen_tokens(tokens: int, padding: torch.Tensor | None = None, seen: int = 21) -> torch.Tensor:
    """Return which tokens of the cache a step sees, ``[batch, 1, 1, tokens]``."""
    sees = torch.zeros(BATCH, 1, 1, tokens, dtype=torch.bool)
    sees[..., :seen] = True if padding is None else padding[:, None, None]
    return sees


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare with the rounding of bf16."""
    torch.testing.assert_close(got.double(), wanted, atol=2e-2, rtol=2e-2)
