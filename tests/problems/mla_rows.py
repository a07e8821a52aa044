"""Stored rows of MLA queries and caches, with their float64 values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlagen.spec.dtype import DType
from mlagen.spec.rows import RowFormat
from tests.problems.problem import E4M3

_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": E4M3}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Rows ``[n, row bytes]``, their ``elements[n, d]``, and their separate scales."""

    rows: torch.Tensor
    elements: torch.Tensor
    scales: torch.Tensor | None = None


def row_bytes(row_format: str, elements: int) -> int:
    """Return the size of a row."""
    return DType(row_format).row_bytes(elements)


def viewed(rows: torch.Tensor, row_format: str) -> torch.Tensor:
    """Return bytes as the tensor of a caller."""
    row = DType(row_format).row
    is_bytes = row is not None and not row.holds_queries
    return rows if is_bytes else rows.view(_TORCH_DTYPES.get(row_format, E4M3))


def format_of(dtype: torch.dtype) -> str:
    """Return the format of rows of plain ``dtype`` elements."""
    return next(name for name, known in _TORCH_DTYPES.items() if known is dtype)


def store(
    content: torch.Tensor,
    rank: int,
    row_format: str,
    *,
    scales: torch.Tensor | None = None,
    latent_scale: float = 1.0,
    rope_scale: float = 1.0,
) -> Stored:
    """Return ``content[n, d]``, rounded to the format.

    ``scales`` are one per row, or one per 128 latent elements of it.
    """
    latent, rope = content[:, :rank].float(), content[:, rank:].float()
    if (row := DType(row_format).row) is not None:
        return _packed(row, latent, rope, scales)
    dtype = _TORCH_DTYPES[row_format]
    factors = torch.tensor(latent_scale).expand_as(latent)
    if scales is not None:
        factors = scales.repeat_interleave(128, dim=1)[:, :rank]
    content = torch.cat([latent / factors, rope / rope_scale], dim=1)
    largest = torch.finfo(dtype).max  # not every torch saturates: some versions overflow to NaN
    stored = content.clamp(-largest, largest).to(dtype)
    factors = torch.cat([factors, torch.tensor(rope_scale).expand_as(rope)], dim=1)
    elements = stored.double() * factors.float().double()
    return Stored(rows=stored.view(torch.uint8), elements=elements, scales=scales)


def _packed(
    row: RowFormat, latent: torch.Tensor, rope: torch.Tensor, outer: torch.Tensor | None
) -> Stored:
    """Return rows of a format, with the ``outer`` scales of each token or inline ones."""
    groups = latent.view(len(latent), row.scales, row.group)
    if row.has_inline_scales:
        scales = (groups.abs().amax(dim=2) / 448).clamp(min=1e-4)
    else:
        assert outer is not None
        scales = outer.view(len(latent), row.scales)
    largest = torch.finfo(E4M3).max  # as in store()
    stored = (groups / scales[:, :, None]).clamp(-largest, largest).to(E4M3)
    factors = scales[:, :1] if row.scales_bf16 else torch.ones(len(latent), 1)
    rope = (rope / factors).to(torch.bfloat16)
    inline = (scales,) if row.has_inline_scales else ()
    parts = (stored.flatten(1), *inline, rope)
    elements = (stored.double() * scales.double()[:, :, None]).flatten(1)
    return Stored(
        rows=torch.cat([part.view(torch.uint8) for part in parts], dim=1),
        elements=torch.cat([elements, rope.double() * factors.double()], dim=1),
        scales=None if row.has_inline_scales else outer,
    )
