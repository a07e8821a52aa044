"""What the dense and the sparse MLA backend share: the workspace, the query, scales and results."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType

from mlagen import max_workspace_bytes
from mlagen.integrations.vllm.warm_up import WARM_UP

FP8_DS_MLA = "fp8_ds_mla"  # a dtype of a KV cache


@cache
def workspace(device: torch.device) -> torch.Tensor:
    """Return the scratch of all layers on ``device``, whose calls follow each other on a stream."""
    return torch.empty(max_workspace_bytes(device), dtype=torch.uint8, device=device)


class DecodeImpl:
    """Beside a common implementation of vLLM: what the layers of both backends have in common."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_quant_query_input: bool

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        features = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "attn_type": attn_type if attn_type != AttentionType.DECODER else None,
        }
        for name, value in features.items():
            if value:
                raise NotImplementedError(f"mlagen: {name} is not supported by MLA, got {value!r}")
        super().__init__(  # type: ignore[call-arg]
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        WARM_UP.register_warmup()
        # Rows of fp8_ds_mla keep the precision of a 16-bit query, as in vLLM's own backends.
        self.supports_quant_query_input = kv_cache_dtype != FP8_DS_MLA


# ``[tokens, heads, head_dim_qk]``, or its latent and its RoPE part, which the kernels read apart.
Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def latent_of(query: Query) -> torch.Tensor:
    """Return the latent part of a query, or the query itself."""
    return query[0] if isinstance(query, tuple) else query


def part_of(query: Query, tokens: slice) -> Query:
    """Return some tokens of a query."""
    if isinstance(query, tuple):
        return query[0][tokens], query[1][tokens]
    return query[tokens]


def one_token_each(query: Query) -> Query:
    """Return a query ``[tokens, 1, heads, ...]``, of requests that have one token each."""
    if isinstance(query, tuple):
        return query[0].unsqueeze(1), query[1].unsqueeze(1)
    return query.unsqueeze(1)


def scales(impl: Any, layer: Any, query: Query, kv_cache: torch.Tensor) -> tuple[float, float]:
    """Return ``bmm1_scale`` and ``bmm2_scale``: the scales of a layer, for e4m3 operands only."""
    e4m3, query_dtype = torch.float8_e4m3fn, latent_of(query).dtype
    q_scale = layer._q_scale_float if query_dtype == e4m3 else 1.0  # noqa: SLF001
    k_scale = layer._k_scale_float if kv_cache.dtype == e4m3 else 1.0  # noqa: SLF001
    return impl.scale * q_scale * k_scale, k_scale


def per_token(
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output ``[tokens, heads, kv_lora_rank]``, and an LSE as ``[tokens, heads]``."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    return out.flatten(0, -3), None if lse is None else lse.flatten(0, -2)
