"""Shared parts of the CPU backends: query offsets, dequantized KV rows, and softmax with sinks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mlagen.families.common.arguments import FLOAT_DTYPES
from mlagen.spec.dtype import DType

Function = TypeVar("Function", bound=Callable[..., Any])

_TORCH_DTYPES = {dtype: of_torch for of_torch, dtype in FLOAT_DTYPES.items()}


def without_autocast(function: Function) -> Function:
    """Return a function whose GEMMs keep the dtype of their operands, under autocast too."""
    kept: Function = torch.autocast("cpu", enabled=False)(function)
    return kept


def query_offsets(cu_seqlens_q: torch.Tensor | None, batch: int, q_len: int) -> list[int]:
    """Return the ``batch + 1`` offsets of the requests' query tokens."""
    if cu_seqlens_q is not None:
        return [int(offset) for offset in cu_seqlens_q]
    return [index * q_len for index in range(batch + 1)]


def stored_rows(cache: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the bytes ``[n, row bytes]`` of tokens of ``cache[pages, page_size, width]``."""
    return cache.view(torch.uint8)[pages, slots].contiguous()


def dequantized(rows: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return the elements ``[n, d]`` of the stored bytes ``rows[n, row bytes]``.

    Scales in other tensors are not applied.
    """
    row = dtype.row
    if row is None:
        return rows.view(_TORCH_DTYPES[dtype]).float()
    latent = _part(rows, 0, row.code_bytes, torch.float8_e4m3fn)
    if row.has_inline_scales:
        scales = _part(rows, row.code_bytes, row.bf16_offset, torch.float32)
        latent = scaled_groups(latent, scales, row.group)
    rope = _part(rows, row.bf16_offset, rows.shape[-1], torch.bfloat16)
    return torch.cat([latent.float(), rope.float()], dim=-1)


def scaled_groups(latent: torch.Tensor, scales: torch.Tensor, size: int = 128) -> torch.Tensor:
    """Return ``latent[n, d]`` times ``scales[n, k]``, one for each group of ``size`` elements."""
    return latent.float() * scales.repeat_interleave(size, dim=-1)[..., : latent.shape[-1]]


def softmax_with_sinks(
    scores: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the softmax of ``scores[..., n]``, and the natural LSE including ``sinks[...]``.

    The LSE of a fully masked row is its sink, or minus infinity; its weights are undefined.
    """
    if sinks is None:
        sinks = scores.new_full(scores.shape[:-1], -math.inf)
    sinks = sinks[..., None]
    logits = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., :-1]
    # An infinite sink has all the weight; torch.softmax would compute inf - inf.
    weights = torch.where(sinks == math.inf, (scores - sinks).exp(), weights)
    return weights, torch.logsumexp(logits, dim=-1)


def _part(rows: torch.Tensor, first: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    return rows[..., first:end].contiguous().view(dtype)
