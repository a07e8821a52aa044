"""Random KV caches in every stored format, and their values in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlagen.spec.dtype import DType, RowFormat

from .cases import NVFP4_BLOCK

TORCH_DTYPES = {
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.E4M3: torch.float8_e4m3fn,
}

# An int8 element is 32 times its value, so that four standard deviations fit.
INT8_SCALE = 1 / 32

_E4M3_MAX = 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Stored elements, and the block scales of an NVFP4 cache."""

    data: torch.Tensor
    block_scales: torch.Tensor | None = None


def element_scale(dtype: DType) -> float:
    """Return the factor of stored elements that the scales of a call apply."""
    return INT8_SCALE if dtype is DType.INT8 else 1.0


def random_cache(dtype: DType, shape: tuple[int, ...], generator: torch.Generator) -> Stored:
    """Return a cache of about unit variance; the last size of ``shape`` is the head dim."""
    device = generator.device
    if dtype is DType.NVFP4:
        *rows, head_dim = shape
        data = torch.randint(
            256, (*rows, head_dim // 2), generator=generator, device=device, dtype=torch.uint8
        )
        blocks = torch.rand((*rows, head_dim // NVFP4_BLOCK), generator=generator, device=device)
        # The root mean square of e2m1 numbers is 2.9.
        return Stored(data=data, block_scales=(blocks * 0.2 + 0.25).to(torch.float8_e4m3fn))
    numbers = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    if dtype is DType.INT8:
        return Stored(data=(numbers / INT8_SCALE).round().clamp(-127, 127).to(torch.int8))
    if dtype.row is not None:
        return Stored(data=_packed(numbers, dtype.row))
    return Stored(data=numbers.to(TORCH_DTYPES[dtype]))


def dequantize(dtype: DType, rows: Stored) -> torch.Tensor:
    """Return the fp32 values of rows, without the scales of the call."""
    data = rows.data
    if dtype.row is not None:
        return _unpacked(data, dtype.row)
    if dtype is not DType.NVFP4:
        return data.float() * element_scale(dtype)
    assert rows.block_scales is not None, "NVFP4 has block scales"
    magnitudes = torch.tensor(_E2M1, device=data.device)
    values = torch.cat([magnitudes, -magnitudes])
    # The lower half of a byte is the first element.
    pairs = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)
    blocks = _in_blocks(values[pairs.int()], NVFP4_BLOCK)
    return (blocks * rows.block_scales.float().unsqueeze(-1)).flatten(-2)


def _packed(numbers: torch.Tensor, row: RowFormat) -> torch.Tensor:
    """Pack bf16 elements into rows with inline scales."""
    latent = _in_blocks(numbers[..., : row.latent_elements].float(), row.scaled_elements)
    scales = latent.abs().amax(-1).clamp_min(1e-8) / _E4M3_MAX
    quantized = (latent / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2)
    rope = numbers[..., row.latent_elements :].contiguous()
    return torch.cat([part.view(torch.uint8) for part in (quantized, scales, rope)], dim=-1)


def _unpacked(data: torch.Tensor, row: RowFormat) -> torch.Tensor:
    latent = data[..., : row.latent_elements].contiguous().view(torch.float8_e4m3fn).float()
    scales = data[..., row.latent_elements : row.rope_offset].contiguous().view(torch.float32)
    rope = data[..., row.rope_offset :].contiguous().view(torch.bfloat16).float()
    blocks = _in_blocks(latent, row.scaled_elements) * scales.unsqueeze(-1)
    return torch.cat([blocks.flatten(-2), rope], dim=-1)


def _in_blocks(numbers: torch.Tensor, size: int) -> torch.Tensor:
    return numbers.reshape(*numbers.shape[:-1], -1, size)
