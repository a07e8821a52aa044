"""An MLA layer as transformers has it, in plain torch, and a model of some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

HEADS, NOPE, ROPE, LATENT, VALUE = 4, 32, 64, 512, 32


class Layer(torch.nn.Module):
    """The part of ``DeepseekV3Attention`` that an integration reads."""

    num_key_value_groups = 1

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.kv_lora_rank, self.qk_rope_head_dim = LATENT, ROPE
        self.qk_nope_head_dim, self.v_head_dim = NOPE, VALUE
        self.kv_b_proj = torch.nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)

    def expand_kv(
        self, latents: torch.Tensor, rope: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all heads."""
        batch, _, tokens, _ = latents.shape
        both = self.kv_b_proj(latents).view(batch, tokens, HEADS, -1).transpose(1, 2)
        keys, values = both.split([NOPE, VALUE], dim=-1)
        return torch.cat([keys, rope.expand(-1, HEADS, -1, -1)], dim=-1), values


class Model(torch.nn.Module):
    """A model of two layers, whose attention implementation can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.layers = torch.nn.ModuleList(Layer(self.config) for _ in range(2))
        self.to(torch.bfloat16)

    def set_attn_implementation(self, name: str) -> None:
        """Set it, for all layers."""
        self.config._attn_implementation = name
