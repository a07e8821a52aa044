"""Scales of an FP8 KV cache in a BatchMLA run."""

from __future__ import annotations

import math

import torch

from mlagen.errors import ArgumentError
from mlagen.families.common.arguments import (
    reject,
    require,
    require_contiguous,
    require_float32,
    require_tensor,
)


def require_tensor_spec(
    tensor: object,
    name: str,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return a tensor with the given shape, dtype and device; messages are FlashInfer's."""
    known = require_tensor(tensor, name)
    require(known.shape == shape, f"Invalid shape of {name}", list(shape), list(known.shape))
    require(known.dtype is dtype, f"Invalid dtype of {name}", dtype, known.dtype)
    require(known.device == device, f"Invalid device of {name}", device, known.device)
    return known


def require_positive(scale: object, argument: str) -> float:
    """Return ``scale`` if it is a finite float32 number above 0."""
    subject, rule = f"{argument} must be a finite positive value", "a float above 0"
    number = require_float32(scale, subject, rule)
    if not 0 < number < math.inf:
        reject(subject, rule, number)
    return number


def check_kv_scales(
    ckv_cache: torch.Tensor,
    *,
    is_dequantised: bool,
    ckv_scale: float | None,
    ckv_scale_arr: torch.Tensor | None,
    kpe_scale: float | None,
) -> tuple[float, float]:
    """Return the scales of latent and rope elements; the former is 1 with ``ckv_scale_arr``.

    Raises
    ------
    ArgumentError
        If the scales do not match the cache.
    """
    given = [scale is not None for scale in (ckv_scale, ckv_scale_arr, kpe_scale)]
    if not is_dequantised:
        if any(given):
            raise ArgumentError(
                "ckv_scale, ckv_scale_arr, kpe_scale: only valid when kv_data_type is "
                f"torch.float8_e4m3fn, expected None, got a cache of {ckv_cache.dtype}"
            )
        return 1.0, 1.0
    if given[0] == given[1]:
        raise ArgumentError(
            "Exactly one of ckv_scale or ckv_scale_arr: expected for an e4m3 cache, got "
            f"{'both' if given[0] else 'none'}"
        )
    if kpe_scale is None:
        raise ArgumentError("kpe_scale is required: expected a float for an e4m3 cache, got None")
    rope_scale = require_positive(kpe_scale, "kpe_scale")
    if ckv_scale_arr is None:
        return require_positive(ckv_scale, "ckv_scale"), rope_scale
    shape = (*ckv_cache.shape[:-1], 4)
    scales = require_tensor_spec(
        ckv_scale_arr,
        "ckv_scale_arr",
        shape=shape,
        dtype=torch.float32,
        device=ckv_cache.device,
    )
    require_contiguous(scales, "ckv_scale_arr")
    return 1.0, rope_scale
