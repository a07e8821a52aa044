"""Torch ops of :class:`mlagen.mla.BatchMLAPagedAttentionWrapper` runs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from mlagen.errors import ArgumentError
from mlagen.families.common.arguments import require_flag
from mlagen.mla.batch_checks import check_contract
from mlagen.mla.batch_layout import BatchLayout, HostMetadata
from mlagen.mla.batch_plan import BatchPlan, BatchSettings
from mlagen.mla.batch_run import run_planned, split_packed
from mlagen.mla.planless import run_planless
from mlagen.observe.observed import observable
from mlagen.torch_ops.outputs import mla_dtype
from mlagen.torch_ops.traced import as_op, traceable

_RANK = 512

_settings = lru_cache(maxsize=256)(BatchSettings)


def _planned_outputs(given: dict[str, Any]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    query = given["q_nope"]
    lse = tuple(query.shape[:2]) if given["return_lse"] else (0,)
    return [(tuple(query.shape), mla_dtype(query)), (lse, torch.float32)]


def _planless_outputs(given: dict[str, Any]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    query = given["q_nope"]
    return [((*query.shape[:-1], _RANK), query.dtype)]


@traceable(_planned_outputs, has_lse=True)
@observable
def batch_mla_run(
    workspace_buffer: torch.Tensor,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor | None,
    kv_indices: torch.Tensor,
    kv_len_arr: torch.Tensor,
    page_size: int,
    causal: bool,
    sm_scale: float,
    max_kv_len: int,
    max_q_len: int | None = None,
    q_len: int = 0,
    tokens: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    return_lse_base_on_e: bool = False,
    ckv_scale: float | None = None,
    ckv_scale_arr: torch.Tensor | None = None,
    kpe_scale: float | None = None,
    o_scale: float | None = None,
    sinks: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    bmm1_scale: float | None = None,
    bmm2_scale: float | None = None,
    enable_pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute a planned run."""
    settings = _settings(
        num_heads=q_nope.shape[1],
        head_dim_ckv=q_nope.shape[2],
        head_dim_kpe=q_pe.shape[2],
        page_size=page_size,
        causal=causal,
        sm_scale=sm_scale,
        q_data_type=q_nope.dtype,
        kv_data_type=ckv_cache.dtype,
    )
    plan = BatchPlan(
        settings=settings,
        layout=BatchLayout(
            qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr
        ),
        metadata=HostMetadata(
            max_kv_len=max_kv_len, max_q_len=max_q_len, q_len=q_len, tokens=tokens
        ),
        scales_cache=settings.is_dequantized and bmm1_scale is None,
        enable_pdl=enable_pdl,
    )
    given: Any = (
        *(workspace_buffer, q_nope, q_pe, ckv_cache, kpe_cache, out, lse),
        *(return_lse, return_lse_base_on_e, ckv_scale, ckv_scale_arr, kpe_scale),
        *(o_scale, sinks, skip_softmax_threshold_scale_factor, bmm1_scale, bmm2_scale),
    )
    result = run_planned(plan, *given)
    return result[0], result[1] if len(result) > 1 else None


@traceable(_planless_outputs)
@observable
def batch_mla_run_planless(
    workspace_buffer: torch.Tensor,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_len: torch.Tensor,
    page_table: torch.Tensor,
    o_scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a run without a plan."""
    return run_planless(
        workspace_buffer,
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        out=out,
        kv_len=kv_len,
        page_table=page_table,
        o_scale=o_scale,
        rejected={},
    )


def call_planned(
    plan: BatchPlan,
    workspace: torch.Tensor,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    return_lse_base_on_e: bool,
    *scales: Any,
) -> tuple[torch.Tensor, ...]:
    """Compute a planned run as an op; a compiler traces this."""
    settings, layout, metadata = plan.settings, plan.layout, plan.metadata
    return_lse = require_flag(return_lse, "return_lse")
    is_natural = require_flag(return_lse_base_on_e, "return_lse_base_on_e")
    check_contract(plan.contract, return_lse or lse is not None, is_natural, *scales[3:])
    if q_pe is q_nope:
        q_nope, q_pe = split_packed(q_nope, settings, "query", has_memory=False)
    if kpe_cache is ckv_cache:
        ckv_cache, kpe_cache = split_packed(ckv_cache, settings, "kv_cache", has_memory=False)
    tensors = (q_nope, q_pe, ckv_cache, kpe_cache)
    _check_heads(settings, tensors)
    has_lse, target = return_lse or lse is not None, _without_gaps(out)
    result: Any = as_op(
        "batch_mla_run",
        workspace,
        *tensors,
        layout.qo_indptr,
        layout.kv_indptr,
        layout.kv_indices,
        layout.kv_len_arr,
        settings.page_size,
        settings.causal,
        settings.sm_scale,
        metadata.max_kv_len,
        metadata.max_q_len,
        metadata.q_len,
        metadata.tokens,
        target,
        lse,
        has_lse,
        is_natural,
        *scales,
        plan.enable_pdl,
    )
    result, *others = result if has_lse else (result,)
    return (result if out is None or out is target else out.copy_(result), *others)


def call_planless(
    workspace: torch.Tensor,
    *tensors: torch.Tensor,
    out: torch.Tensor | None,
    kv_len: torch.Tensor | None,
    page_table: torch.Tensor | None,
    o_scale: float | None,
    rejected: dict[str, Any],
) -> torch.Tensor:
    """Compute ``run_planless`` as an op; a compiler traces this."""
    for name, value in rejected.items():
        if value is not None:
            raise ArgumentError(f"{name} does not support cutlass backend, expected none")
    if o_scale is not None and out is None:
        raise ArgumentError("out tensor must be provided when o_scale is given, got None")
    target = out if o_scale is None else _without_gaps(out)
    result: torch.Tensor = as_op(
        "batch_mla_run_planless", workspace, *tensors, kv_len, page_table, o_scale, target
    )
    return result if out is None or out is target else out.copy_(result)


def _without_gaps(out: torch.Tensor | None) -> torch.Tensor | None:
    """Return an output that the op may write: Dynamo traces no op into another."""
    if out is None or out.is_contiguous():
        return out
    return torch.empty_like(out, memory_format=torch.contiguous_format)


def _check_heads(settings: BatchSettings, tensors: tuple[torch.Tensor, ...]) -> None:
    """Reject tensors that differ from the plan; the op derives these settings from them."""
    query, rope, cache, _ = tensors
    planned = (
        ("q_nope.shape[1]", settings.num_heads, query.shape[1]),
        ("q_nope.shape[2]", settings.head_dim_ckv, query.shape[2]),
        ("q_pe.shape[2]", settings.head_dim_kpe, rope.shape[2]),
        ("q_nope.dtype", settings.q_data_type, query.dtype),
        ("ckv_cache.dtype", settings.kv_data_type, cache.dtype),
    )
    for name, expected, got in planned:
        if got != expected:
            raise ArgumentError(f"{name}: expected {expected} (of plan), got {got}")
