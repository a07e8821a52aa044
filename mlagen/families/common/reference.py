"""Shared parts of the CPU backends: query offsets, dequantized KV rows, and softmax with sinks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mlagen.families.common.arguments import FLOAT_DTYPES
from mlagen.spec.dtype import DType
from mlagen.spec.rows import SCALE_BYTES, RowFormat

Function = TypeVar("Function", bound=Callable[..., Any])

# By code, the sign in its highest bit.
_E2M1 = [sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]

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
    if dtype.row is None:
        return rows.view(_TORCH_DTYPES[dtype]).float()
    return elements_of(dtype.row, rows)


def elements_of(
    row: RowFormat, data: torch.Tensor, scale_rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the elements ``[n, d]`` of data rows, with their scale rows if the page has some.

    Scales in other tensors are not applied.
    """
    codes = _codes(row, data[..., : row.code_bytes])
    if row.has_inline_scales:
        scale_rows = data[..., row.code_bytes : row.bf16_offset]
    if scale_rows is not None:
        codes = scaled_groups(codes, _scales(row, scale_rows), row.group)
    rest = _part(data, row.bf16_offset, data.shape[-1], torch.bfloat16)
    return torch.cat([codes, rest.float()], dim=-1)


def _codes(row: RowFormat, stored: torch.Tensor) -> torch.Tensor:
    if row.code == "e4m3":
        return stored.contiguous().view(torch.float8_e4m3fn).float()
    values = torch.tensor(_E2M1, dtype=torch.float32, device=stored.device)
    return values[torch.stack([stored & 15, stored >> 4], dim=-1).long()].flatten(-2)


def _scales(row: RowFormat, stored: torch.Tensor) -> torch.Tensor:
    """Return the scales of tokens, without the padding behind them."""
    size = row.scales * SCALE_BYTES[row.scale_code]
    stored = stored[..., :size].contiguous()
    if row.scale_code == "fp32":
        return stored.view(torch.float32)
    if row.scale_code == "e4m3":
        return stored.view(torch.float8_e4m3fn).float()
    # ue8m0: the exponent field, but for 2^-127, which is subnormal, and NaN.
    exponents = stored.int()
    powers = torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)
    return torch.where(exponents == 0xFF, math.nan, powers)


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


def count_of_rank(tokens: int, world: int, rank: int) -> int:
    """Return how many of the first ``tokens`` tokens a rank has; it has every ``world``-th."""
    return max(0, -((rank - tokens) // world))
