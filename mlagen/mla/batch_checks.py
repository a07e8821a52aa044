"""Checks of the outputs and scales of BatchMLA runs, and its FP8 outputs."""

from __future__ import annotations

import math
from typing import NoReturn

import torch

from mlagen.errors import ArgumentError
from mlagen.families.common.arguments import (
    reject,
    require,
    require_contiguous,
    require_float32,
    require_number,
    require_tensor,
    shown,
)
from mlagen.families.common.memory import (
    require_memory,
    require_plain,
    require_shaped,
    require_writable,
)
from mlagen.mla.batch_contract import MLAInputContract

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_contract(
    contract: MLAInputContract | None,
    has_lse: bool,
    is_natural: bool,
    o_scale: float | None,
    sinks: torch.Tensor | None,
    skip_softmax: float | None,
    *bmm_scales: float | None,
) -> None:
    """Reject a run that is not as its plan declares, in FlashInfer's words.

    Raises
    ------
    ArgumentError
        The message names the difference.
    """
    if contract is None:
        return
    lse_mode = ("basee" if is_natural else "base2") if has_lse or is_natural else "none"
    if contract.lse_mode is not None and lse_mode != contract.lse_mode:
        _mismatch("LSE mode", contract.lse_mode, lse_mode)
    if (o_scale is not None) != (contract.output_scale == "per-tensor"):
        _mismatch("o_scale", contract.output_scale, shown(o_scale))
    if (sinks is not None) != contract.use_sinks:
        _mismatch("sinks", f"use_sinks={contract.use_sinks}", "none" if sinks is None else "some")
    if (skip_softmax is not None) != contract.skip_softmax:
        _mismatch("skip_softmax", contract.skip_softmax, shown(skip_softmax))
    has_scales = [scale is not None for scale in bmm_scales]
    if any(has_scales) and not all(has_scales):
        reject("bmm1_scale and bmm2_scale must be provided together", "both or none", "one")
    if any(has_scales) and contract.scale_mode != "bmm-scalar":
        _mismatch("scale mode", contract.scale_mode, "bmm-scalar")
    if contract.scale_mode == "bmm-scalar" and not all(has_scales):
        _mismatch("scale mode", contract.scale_mode, "no bmm1_scale and bmm2_scale")


def _mismatch(name: str, planned: object, got: object) -> NoReturn:
    raise ArgumentError(
        f"MLA planned run argument {name} mismatch: expected {planned} (of plan), got {got}"
    )


def check_outputs(
    out: torch.Tensor | None, lse: torch.Tensor | None, q_nope: torch.Tensor, dtype: torch.dtype
) -> None:
    """Reject outputs of a run that differ from its query in shape or device.

    Raises
    ------
    ArgumentError
        If there is one.
    """
    shape, device = tuple(q_nope.shape), q_nope.device
    if out is not None:
        require_tensor_spec(out, "out", shape=shape, dtype=dtype, device=device)
        # The MLA call checks a plain contiguous output itself, as a view.
        if out.__class__ is not torch.Tensor or out.requires_grad or not out.is_contiguous():
            require_memory(out, "out")
            require_writable(out, "out")
    if lse is not None:
        require_tensor_spec(lse, "lse", shape=shape[:2], dtype=torch.float32, device=device)


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
    require_shaped(known, name)
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


def checked_kv_scales(
    scales_cache: bool,
    ckv_cache: torch.Tensor,
    ckv_scale: float | None,
    ckv_scale_arr: torch.Tensor | None,
    kpe_scale: float | None,
) -> tuple[float, float]:
    """Return the scales of latent and rope elements; the former is 1 with ``ckv_scale_arr``."""
    has = [scale is not None for scale in (ckv_scale, ckv_scale_arr, kpe_scale)]
    if not scales_cache:
        if any(has):
            raise ArgumentError(
                "ckv_scale, ckv_scale_arr, kpe_scale: only valid when kv_data_type is "
                f"torch.float8_e4m3fn, expected None, got a cache of {ckv_cache.dtype}"
            )
        return 1.0, 1.0
    if has[0] == has[1]:
        raise ArgumentError(
            "Exactly one of ckv_scale or ckv_scale_arr: expected for an e4m3 cache, got "
            f"{'both' if has[0] else 'none'}"
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


def checked_bmm_scales(
    bmm1_scale: float | None, bmm2_scale: float | None, sm_scale: float
) -> tuple[float, float]:
    """Return the factors of scores and output.

    Raises
    ------
    ArgumentError
        If one is no number of float32.
    """
    if bmm1_scale is None:
        return sm_scale, 1.0
    return require_float32(bmm1_scale, "bmm1_scale"), require_float32(bmm2_scale, "bmm2_scale")


def require_threshold(factor: object) -> None:
    """Reject a skip-softmax threshold that is no number; no KV block is skipped.

    Raises
    ------
    ArgumentError
        If it is none.
    """
    if factor is not None:
        require_number(factor, "skip_softmax_threshold_scale_factor")


def checked_fp8_out(
    out: torch.Tensor | None, q_nope: torch.Tensor, width: int, *, has_memory: bool = True
) -> torch.Tensor:
    """Return an output for results that are divided by a scale.

    Raises
    ------
    ArgumentError
        If it is missing, or breaks a rule.
    """
    require_tensor(q_nope, "q_nope")
    if has_memory:
        require_plain(q_nope, "q_nope")
    if out is None:
        raise ArgumentError("out tensor must be provided when o_scale is given, got None")
    if require_tensor(out, "out").dtype not in FP8_DTYPES:
        rule = " or ".join(map(str, FP8_DTYPES))
        raise ArgumentError(
            f"out must be an FP8 tensor when o_scale is given, expected {rule}, got {out.dtype}"
        )
    if has_memory:
        require_memory(out, "out")
        require_writable(out, "out")
    shape = (*q_nope.shape[:2], width)
    return require_tensor_spec(out, "out", shape=shape, dtype=out.dtype, device=q_nope.device)


def saturated_into(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Copy results to an FP8 output, the nearest number of its dtype for each, and return it."""
    limit = torch.finfo(out.dtype).max  # larger values convert to NaN or infinity
    return out.copy_(result.clamp(-limit, limit))
