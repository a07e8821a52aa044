"""Rows of a KV cache by their description: quantization, pages, and the values of tokens.

Independent of the package's own writers and readers, so that an error of these is found.
"""

from __future__ import annotations

import torch

from mlagen.spec.rows import RowFormat

_E4M3_MAX = 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODE_MAX = {"e4m3": _E4M3_MAX, "e2m1": _E2M1[-1]}
_EXPONENT_BIAS = 127
_TINY = 1e-8


def pack_pages(numbers: torch.Tensor, row: RowFormat) -> torch.Tensor:
    """Return the cache of bf16 ``[pages, page_size, elements]``, uint8 ``[.., row bytes]``.

    A page with scale rows is padded to a multiple of its data rows, as servers pad it.
    """
    codes, scales = _quantized(numbers[..., : row.scaled_elements].float(), row)
    rest = numbers[..., row.scaled_elements :].contiguous().view(torch.uint8)
    if row.has_inline_scales:
        return torch.cat([codes, scales, rest], dim=-1)
    pages, page_size, _ = numbers.shape
    data = torch.cat([codes, rest], dim=-1)
    data_bytes, row_bytes = data.shape[-1], data.shape[-1] + scales.shape[-1]
    stride = -(-page_size * row_bytes // data_bytes) * data_bytes
    stored = torch.zeros(pages, stride, dtype=torch.uint8, device=numbers.device)
    stored[:, : page_size * data_bytes] = data.flatten(1)
    stored[:, page_size * data_bytes : page_size * row_bytes] = scales.flatten(1)
    return stored.as_strided((pages, page_size, row_bytes), (stride, row_bytes, 1))


def values_of(cache: torch.Tensor, tokens: torch.Tensor, row: RowFormat) -> torch.Tensor:
    """Return the fp32 values of tokens, entries of a cache that :func:`pack_pages` returned."""
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


def _quantized(numbers: torch.Tensor, row: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of the codes, and those of the scales with their padding."""
    groups = in_groups(numbers, row.group)
    wanted = groups.abs().amax(-1).clamp_min(_TINY) / _CODE_MAX[row.code]
    if row.scale_code == "ue8m0":
        stored = (wanted.log2().ceil() + _EXPONENT_BIAS).to(torch.uint8)
    else:
        stored = wanted.to(torch.float8_e4m3fn if row.scale_code == "e4m3" else torch.float32)
    padded = torch.nn.functional.pad(stored.view(torch.uint8), (0, row.scale_padding))
    ratios = (groups / _scales(stored.view(torch.uint8), row).unsqueeze(-1)).flatten(-2)
    if row.code == "e4m3":
        return ratios.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8), padded
    magnitudes = torch.tensor(_E2M1, device=numbers.device)
    nearest = torch.bucketize(ratios.abs(), (magnitudes[1:] + magnitudes[:-1]) / 2)
    low, high = in_groups((nearest + 8 * (ratios < 0)).to(torch.uint8), 2).unbind(-1)
    return low | high << 4, padded


def _scales(stored: torch.Tensor, row: RowFormat) -> torch.Tensor:
    if row.scale_code == "ue8m0":
        return torch.exp2(stored.float() - _EXPONENT_BIAS)
    return _viewed(stored, torch.float8_e4m3fn if row.scale_code == "e4m3" else torch.float32)


def _viewed(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return stored.contiguous().view(dtype).float()
