"""Runs of a BatchMLA plan: checks of the tensors and scales against the plan."""

from __future__ import annotations

import math

import torch

from mlagen.errors import ArgumentError
from mlagen.families.common.arguments import (
    reject,
    require,
    require_contiguous,
    require_dims,
    require_flag,
    require_float32,
    require_shape,
    require_tensor,
)
from mlagen.families.common.call_key import KeyKinds
from mlagen.families.common.memory import require_memory, require_plain, require_writable
from mlagen.families.mla.args import MlaArgNames, MlaArgs
from mlagen.families.mla.dispatch import MLA
from mlagen.mla.batch_plan import BatchPlan, BatchSettings
from mlagen.torch_ops.replayable import replayable

_NAMES = MlaArgNames(
    query="q_nope",
    query_rope="q_pe",
    kv_cache="ckv_cache",
    rope_cache="kpe_cache",
    kv_scales="ckv_scale_arr",
    workspace_buffer="float_workspace_buffer",
    block_tables="kv_indices",
    kv_indptr="kv_indptr",
    seq_lens="kv_len_arr",
    cum_seq_lens_q="qo_indptr",
    bmm1_scale="sm_scale",
)


@replayable(
    MLA,
    KeyKinds(
        tensors="float_workspace_buffer q_nope q_pe ckv_cache kpe_cache *plan.tensors",
        optional="out lse ckv_scale_arr",
        outputs="out lse",
        length="plan.metadata.max_kv_len",
        constants=("plan.key",),
        words="return_lse return_lse_base_on_e ckv_scale kpe_scale",
    ),
    returns="outputs",
    has_op=False,
)
def run_planned(
    plan: BatchPlan,
    float_workspace_buffer: torch.Tensor,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    return_lse_base_on_e: bool = False,
    ckv_scale: float | None = None,
    ckv_scale_arr: torch.Tensor | None = None,
    kpe_scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute a run, whose tensors are checked against its plan; returns the requested outputs.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule or differs from the plan.
    """
    settings, layout, metadata = plan.settings, plan.layout, plan.metadata
    return_lse = require_flag(return_lse, "return_lse")
    is_natural = require_flag(return_lse_base_on_e, "return_lse_base_on_e")
    _check_as_planned(plan, q_nope, q_pe, ckv_cache, kpe_cache)
    latent_scale, rope_scale = _checked_scales(
        settings, ckv_cache, ckv_scale, ckv_scale_arr, kpe_scale
    )
    _check_outputs(out, lse, q_nope)
    shape = q_nope.shape
    query, rope = q_nope, q_pe
    is_uniform = metadata.q_len > 0 and metadata.tokens == shape[0]
    if is_uniform:  # CTAs need no search for the request of a token
        grouped = (layout.batch, metadata.q_len, settings.num_heads)
        try:
            query, rope = query.view(*grouped, query.shape[-1]), rope.view(*grouped, rope.shape[-1])
        except RuntimeError:  # freed storage
            require_memory(q_nope, "q_nope")
            require_memory(q_pe, "q_pe")
            raise
    has_rope = settings.head_dim_kpe > 0
    args = MlaArgs(
        query=query,
        kv_cache=ckv_cache,
        workspace_buffer=float_workspace_buffer,
        kv_lora_rank=settings.head_dim_ckv,
        qk_rope_head_dim=settings.head_dim_kpe,
        block_tables=layout.kv_indices,
        seq_lens=layout.kv_len_arr,
        max_seq_len=metadata.max_kv_len,
        # The kernels write contiguous rows.
        out=out.view(query.shape) if out is not None and out.is_contiguous() else None,
        bmm1_scale=settings.sm_scale,
        lse=lse,
        return_lse=return_lse or lse is not None,
        return_lse_base="basee" if is_natural else "base2",
        cum_seq_lens_q=None if is_uniform else layout.qo_indptr,
        max_q_len=None if is_uniform else metadata.max_q_len,
        is_causal=settings.causal,
        query_rope=rope if has_rope else None,
        rope_cache=kpe_cache if has_rope else None,
        kv_scales=ckv_scale_arr,
        latent_scale=latent_scale,
        rope_scale=rope_scale,
        kv_indptr=layout.kv_indptr,
        out_shape=tuple(shape),
        names=_NAMES,
    )
    return MLA.dispatch(args, True, out)


def _check_outputs(
    out: torch.Tensor | None, lse: torch.Tensor | None, q_nope: torch.Tensor
) -> None:
    shape, device = tuple(q_nope.shape), q_nope.device
    if out is not None:
        require_tensor_spec(out, "out", shape=shape, dtype=q_nope.dtype, device=device)
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


def _checked_scales(
    settings: BatchSettings,
    ckv_cache: torch.Tensor,
    ckv_scale: float | None,
    ckv_scale_arr: torch.Tensor | None,
    kpe_scale: float | None,
) -> tuple[float, float]:
    """Return the scales of latent and rope elements; the former is 1 with ``ckv_scale_arr``."""
    has = [scale is not None for scale in (ckv_scale, ckv_scale_arr, kpe_scale)]
    if not settings.is_dequantised:
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


def _check_as_planned(
    plan: BatchPlan,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
) -> None:
    """Reject tensors that differ from the plan."""
    settings, metadata = plan.settings, plan.metadata
    parts = (
        ("q_nope", q_nope, "q_data_type", settings.q_data_type),
        ("q_pe", q_pe, "q_data_type", settings.q_data_type),
        ("ckv_cache", ckv_cache, "kv_data_type", settings.kv_data_type),
        ("kpe_cache", kpe_cache, "kv_data_type", settings.kv_data_type),
    )
    for name, tensor, planned, dtype in parts:
        is_plain = tensor.__class__ is torch.Tensor and not tensor.is_nested
        if is_plain and tensor.dtype is dtype and tensor.dim() == 3:  # skips formatting a message
            continue
        if require_tensor(tensor, name).dtype is not dtype:
            reject(f"{name}.dtype", f"{dtype} ({planned} of plan)", tensor.dtype)
        require_plain(tensor, name)
        require_dims(tensor, name, (3,))
    tokens, heads = q_nope.shape[:2]
    if heads != settings.num_heads:
        reject("q_nope.shape[1]", f"{settings.num_heads} (num_heads of plan)", heads)
    if ckv_cache.shape[1] != settings.page_size:
        rule = f"{settings.page_size} (page_size of plan)"
        reject("ckv_cache.shape[1]", rule, ckv_cache.shape[1])
    if q_pe.shape[2] != settings.head_dim_kpe:
        reject("q_pe.shape[2]", f"{settings.head_dim_kpe} (head_dim_kpe of plan)", q_pe.shape[2])
    if settings.head_dim_kpe == 0:
        require_shape(q_pe, "q_pe", ((tokens, heads, 0),))
        rule = "0 (head_dim_kpe of plan)"
        require(kpe_cache.shape[2] == 0, "kpe_cache.shape[2]", rule, kpe_cache.shape[2])
    if metadata.tokens is not None and tokens < metadata.tokens:
        reject("q_nope.shape[0]", f"{metadata.tokens} (qo_indptr[-1]) or more", tokens)
    if plan.layout.batch == 0:
        require(tokens == 0, "q_nope.shape[0]", "0 (no requests were planned)", tokens)
