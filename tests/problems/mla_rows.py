"""Stored rows of MLA queries and caches, with their float64 values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.problems.problem import E4M3

PACKED_BYTES = {("fp8_ds_mla", 576): 656, ("fp8_ds_mla", 512): 528, ("fp8_per_token", 576): 640}
_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": E4M3}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Rows ``[n, row bytes]``, their ``elements[n, d]``, and their separate scales."""

    rows: torch.Tensor
    elements: torch.Tensor
    scales: torch.Tensor | None = None


def row_bytes(row_format: str, elements: int) -> int:
    """Return the size of a row."""
    size = PACKED_BYTES.get((row_format, elements))
    return size or elements * _TORCH_DTYPES[row_format].itemsize


def viewed(rows: torch.Tensor, row_format: str) -> torch.Tensor:
    """Return bytes as the tensor of a caller."""
    if row_format == "fp8_ds_mla":
        return rows
    return rows.view(_TORCH_DTYPES.get(row_format, E4M3))


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
    if row_format == "fp8_ds_mla":
        return _fp8_ds_mla(latent, rope)
    if row_format == "fp8_per_token":
        assert scales is not None
        return _fp8_per_token(latent, rope, scales)
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


def _fp8_ds_mla(latent: torch.Tensor, rope: torch.Tensor) -> Stored:
    groups = latent.view(-1, 4, 128)
    scales = (groups.abs().amax(dim=2) / 448).clamp(min=1e-4)
    stored = (groups / scales[:, :, None]).to(E4M3)
    rope = rope.to(torch.bfloat16)
    elements = stored.double() * scales.double()[:, :, None]
    parts = (stored.view(-1, 512), scales, rope)
    return Stored(
        rows=torch.cat([part.view(torch.uint8) for part in parts], dim=1),
        elements=torch.cat([elements.view(-1, 512), rope.double()], dim=1),
    )


def _fp8_per_token(latent: torch.Tensor, rope: torch.Tensor, scales: torch.Tensor) -> Stored:
    largest = torch.finfo(E4M3).max  # as in store()
    stored = (latent / scales[:, None]).clamp(-largest, largest).to(E4M3)
    rope = (rope / scales[:, None]).to(torch.bfloat16)
    elements = torch.cat([stored.double(), rope.double()], dim=1) * scales.double()[:, None]
    rows = torch.cat([stored.view(torch.uint8), rope.view(torch.uint8)], dim=1)
    return Stored(rows=rows, elements=elements, scales=scales)
