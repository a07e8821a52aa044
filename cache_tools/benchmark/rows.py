"""The values of tokens in rows of a KV cache, by the description of a row.

Independent of the package's own readers, so that an error of these is found.
"""

from __future__ import annotations

import torch

from mlagen.spec.rows import RowFormat

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


def values_of(cache: torch.Tensor, tokens: torch.Tensor, row: RowFormat) -> torch.Tensor:
    """Return the fp32 values of tokens, entries of a cache ``[pages, page_size, row bytes]``."""
    if row.has_inline_scales:
        return unpack(cache.flatten(0, 1)[tokens], row)
    page_size, stride = cache.shape[1], cache.stride(0)
    data_bytes, scale_bytes = cache.shape[-1] - row.scale_bytes, row.scale_bytes
    stored = cache.as_strided((len(cache), stride), (stride, 1))
    page, slot = (tokens // page_size).unsqueeze(-1), (tokens % page_size).unsqueeze(-1)
    data, scales = (
        stored[page, start + slot * size + torch.arange(size, device=cache.device)]
        for start, size in ((0, data_bytes), (page_size * data_bytes, scale_bytes))
    )
    parts = (data[..., : row.code_bytes], scales, data[..., row.code_bytes :])
    return unpack(torch.cat(parts, dim=-1), row)


def unpack(rows: torch.Tensor, row: RowFormat) -> torch.Tensor:
    """Return the fp32 values of rows, each with its codes, scales and bf16 elements."""
    codes, end = rows[..., : row.code_bytes], row.code_bytes + row.scale_bytes
    values = from_e2m1(codes) if row.code == "e2m1" else _viewed(codes, torch.float8_e4m3fn)
    scales = _scales(rows[..., row.code_bytes : end - row.scale_padding], row)
    scaled = in_groups(values, row.group) * scales.unsqueeze(-1)
    return torch.cat([scaled.flatten(-2), _viewed(rows[..., end:], torch.bfloat16)], dim=-1)


def from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of bytes with two e2m1 each, the first in the lower half."""
    magnitudes = torch.tensor(_E2M1, device=codes.device)
    values = torch.cat([magnitudes, -magnitudes])
    return values[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).int()]


def in_groups(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Split the last axis into groups of ``size``."""
    return numbers.reshape(*numbers.shape[:-1], -1, size)


def _scales(stored: torch.Tensor, row: RowFormat) -> torch.Tensor:
    if row.scale_code == "ue8m0":
        return torch.exp2(stored.float() - _EXPONENT_BIAS)
    return _viewed(stored, torch.float8_e4m3fn if row.scale_code == "e4m3" else torch.float32)


def _viewed(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return stored.contiguous().view(dtype).float()
