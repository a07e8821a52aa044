"""Torch op of :func:`mlagen.mla.flare.flare_mla_decoding`, with cache and mask as tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mlagen.families.common.arguments import reject
from mlagen.mla.flare_kv import PagedKVCache
from mlagen.mla.masks import Mask, code_of, mask_of
from mlagen.torch_ops.outputs import mla_dtype
from mlagen.torch_ops.traced import Op, as_op, define_ops


def define_op(decode: Callable[..., torch.Tensor]) -> None:
    """Define the op, which calls ``decode``."""

    def flare_mla_decoding(
        q: torch.Tensor,
        k: torch.Tensor,
        block_table: torch.Tensor | None,
        cache_lengths: torch.Tensor | None,
        k_scales: torch.Tensor | None,
        mask: str,
        mask_tensors: list[torch.Tensor],
        valid_length: torch.Tensor | None,
        scale: float,
        output: torch.Tensor | None = None,
        ragged: bool = False,
        num_partitions: int | None = None,
        q_scale: torch.Tensor | None = None,
        per_token_scale_rope_aware: bool = False,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys: torch.Tensor | PagedKVCache = k
        if block_table is not None and cache_lengths is not None:
            keys = PagedKVCache(k, block_table, cache_lengths, k_scales)
        return decode(
            q,
            keys,
            mask_of(mask, _as_list(mask_tensors)),
            valid_length,
            scale,
            output=output,
            ragged=ragged,
            num_partitions=num_partitions,
            q_scale=q_scale,
            per_token_scale_rope_aware=per_token_scale_rope_aware,
            kv_scales=kv_scales,
        )

    define_ops(flare_mla_decoding, Op(outputs=_outputs))


def call_op(
    q: torch.Tensor,
    k: torch.Tensor | PagedKVCache,
    mask: Mask,
    *others: Any,
) -> torch.Tensor:
    """Return the result of the entry point, computed by its op; a compiler traces this."""
    tensors: list[torch.Tensor] = []
    if not isinstance(mask, Mask):
        reject("mask", "a mask of mlagen.mla", type(mask).__name__)
    code = code_of(mask, tensors)
    parts: tuple[Any, ...] = (k, None, None, None)
    if isinstance(k, PagedKVCache):
        parts = (k.blocks, k.block_table, k.cache_lengths, k.scales)
    result: torch.Tensor = as_op("flare_mla_decoding", q, *parts, code, tensors, *others)
    return result


def _outputs(given: dict[str, Any]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    query = given["q"]
    return [((*query.shape[:-1], 512), mla_dtype(query))]


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
