"""MLA decode calls: checked and planned once for each form of the arguments, then only launched."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from mlagen.api.arguments import ALIGNMENT_BYTES, require
from mlagen.api.mla_inputs import MlaInputs
from mlagen.api.mla_plan import plan_call, rounded_up
from mlagen.api.mla_request import MlaRequest, check_pointers, check_request, paged_cache
from mlagen.api.reference import decode_mla
from mlagen.engine import kernel_for
from mlagen.errors import UnsupportedError
from mlagen.runtime.launch import launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.plan import MlaDecodePlan
from mlagen.spec.combine import CombineSplitsSpec
from mlagen.spec.mla import MlaDecodeSpec

# Forms of arguments that are remembered; a server sees a few for each batch size.
_MOST_CALLS = 8192

_calls: dict[Hashable, MlaCall] = {}


@dataclass(frozen=True, kw_only=True)
class MlaCall:
    """A form of arguments that is sound, with its kernels loaded and its launch planned."""

    request: MlaRequest
    plan: MlaDecodePlan
    decode: LoadedKernel
    combine: LoadedKernel | None
    combine_blocks: int
    layout: tuple[int, ...]  # the integer fields of the decode kernel's parameters


def run_mla(inputs: MlaInputs, enable_pdl: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute one call; returns the output and, if asked for, the LSE."""
    form = _form_of(inputs)
    try:
        call = _calls.get(form) if form is not None else None
    except TypeError:  # something in it cannot be hashed, such as a list; check_request refuses it
        call = None
    if call is None:
        request = check_request(inputs)
        if request.device.type == "cpu":
            return _run_on_cpu(inputs, request)
        call = _prepare(inputs, request)
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        _calls[form] = call
    return _run_on_gpu(call, inputs, enable_pdl)


def _form_of(inputs: MlaInputs) -> Hashable:
    """Return everything about the arguments that a check or a plan may depend on.

    Written out, for it runs at every call. None if something is not of the kind it should be,
    which :func:`check_request` then says.
    """
    query, cache, workspace, lora_rank, rope_dim, tables, seq_lens, longest = inputs[:8]
    out, bmm1_scale, bmm2_scale, sinks, lse, return_lse, lse_base, cumulative, max_q_len = inputs[
        8:
    ]
    try:
        return (
            (query.shape, query.stride(), query.dtype, query.get_device()),
            (cache.shape, cache.stride(), cache.dtype, cache.get_device()),
            (workspace.shape, workspace.stride(), workspace.dtype, workspace.get_device()),
            (lora_rank, rope_dim),
            (tables.shape, tables.stride(), tables.dtype, tables.get_device()),
            (seq_lens.shape, seq_lens.stride(), seq_lens.dtype, seq_lens.get_device()),
            rounded_up(longest),
            None if out is None else (out.shape, out.stride(), out.dtype, out.get_device()),
            float if bmm1_scale.__class__ is float else _facts(bmm1_scale),
            float if bmm2_scale.__class__ is float else _facts(bmm2_scale),
            None if sinks is None else _facts(sinks),
            (return_lse, lse_base, None if lse is None else _facts(lse)),
            (max_q_len, None if cumulative is None else _facts(cumulative)),
        )
    except (AttributeError, TypeError):
        return None


def _facts(value: object) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.get_device()
    return type(value).__name__


def _prepare(inputs: MlaInputs, request: MlaRequest) -> MlaCall:
    if request.device.type != "cuda":
        raise UnsupportedError(f"query.device: expected cuda or cpu, got {request.device}")
    index = request.device.index
    spec, plan = plan_call(
        device=index,
        dtype=request.dtype,
        kv_lora_rank=request.kv_lora_rank,
        qk_rope_head_dim=request.qk_rope_head_dim,
        page_size=request.page_size,
        batch=request.batch,
        q_len=request.q_len,
        tokens=request.tokens,
        heads=request.heads,
        max_seq_len=inputs.max_seq_len,
    )
    given = inputs.workspace_buffer.numel() * inputs.workspace_buffer.element_size()
    require(
        given >= plan.workspace_bytes,
        "workspace_buffer",
        f"{plan.workspace_bytes} bytes or more for this call",
        f"{given} bytes",
    )
    combine_spec = CombineSplitsSpec(
        arch=spec.arch, dtype=spec.query_dtype, head_dim_vo=spec.head_dim_vo
    )
    return MlaCall(
        request=request,
        plan=plan,
        decode=kernel_for(spec, index),
        combine=kernel_for(combine_spec, index) if plan.splits > 1 else None,
        combine_blocks=request.tokens * request.heads * combine_spec.slices,
        layout=_layout(spec, request, plan),
    )


def _layout(spec: MlaDecodeSpec, request: MlaRequest, plan: MlaDecodePlan) -> tuple[int, ...]:
    values = {
        "query_stride": request.query_stride,
        "query_head_stride": request.query_head_stride,
        "page_stride": request.page_stride * spec.kv_dtype.bytes,
        "token_stride": request.token_stride * spec.kv_dtype.bytes,
        "total_rows": request.tokens * request.heads,
        "heads": request.heads,
        "q_len": request.q_len,
        "max_pages": request.max_pages,
        "block_tables_stride": request.block_tables_stride,
        "num_pages": request.num_pages,
        "row_tiles": plan.row_tiles,
        "splits": plan.splits,
    }
    return tuple(values[field.name] for field in spec.parameters if field.code in "qi")


def _run_on_gpu(
    call: MlaCall, inputs: MlaInputs, enable_pdl: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    request, plan = call.request, call.plan
    out, lse = inputs.out, inputs.lse if inputs.return_lse else None
    if out is None:
        out = torch.empty(request.out_shape, dtype=request.dtype, device=request.device)
    if lse is None and inputs.return_lse:
        lse = torch.empty(request.lse_shape, dtype=torch.float32, device=request.device)
    if plan.blocks == 0:
        return out, lse

    query = inputs.query.data_ptr()
    cache = inputs.kv_cache.data_ptr()
    workspace = inputs.workspace_buffer.data_ptr()
    out_pointer = out.data_ptr()
    if (query | cache | workspace | out_pointer) % ALIGNMENT_BYTES:
        check_pointers(inputs)
    bmm1_tensor, bmm1_scale = _scale(inputs.bmm1_scale)
    bmm2_tensor, bmm2_scale = _scale(inputs.bmm2_scale)
    sinks = inputs.sinks.data_ptr() if inputs.sinks is not None else 0
    lse_pointer = lse.data_ptr() if lse is not None else 0
    lse_factor = math.log(2) if inputs.return_lse_base == "basee" else 1.0
    # The partial rows come first, then their LSE.
    partial_lse = workspace + plan.partial_rows * request.kv_lora_rank * 4
    launch(
        call.decode,
        plan.blocks,
        enable_pdl,
        query,
        cache,
        inputs.block_tables.data_ptr(),
        inputs.seq_lens.data_ptr(),
        inputs.cum_seq_lens_q.data_ptr() if inputs.cum_seq_lens_q is not None else 0,
        bmm1_tensor,
        bmm2_tensor,
        sinks,
        out_pointer,
        lse_pointer,
        workspace,
        partial_lse,
        *call.layout,
        bmm1_scale,
        bmm2_scale,
        lse_factor,
    )
    if call.combine is not None:
        launch(
            call.combine,
            call.combine_blocks,
            enable_pdl,
            workspace,
            partial_lse,
            bmm2_tensor,
            sinks,
            out_pointer,
            lse_pointer,
            request.tokens * request.heads,
            request.heads,
            plan.splits,
            bmm2_scale,
            lse_factor,
        )
    return out, lse


def _scale(scale: float | torch.Tensor) -> tuple[int, float]:
    """Return a pointer and a value, of which the kernel takes the pointer if there is one."""
    if isinstance(scale, torch.Tensor):
        return scale.data_ptr(), 0.0
    return 0, scale


def _run_on_cpu(inputs: MlaInputs, request: MlaRequest) -> tuple[torch.Tensor, torch.Tensor | None]:
    out, lse = decode_mla(inputs, request, paged_cache(inputs))
    if inputs.out is not None:
        out = inputs.out.copy_(out.view(request.out_shape))
    else:
        out = out.view(request.out_shape)
    if not inputs.return_lse:
        return out, None
    lse = lse.view(request.lse_shape)
    return out, lse if inputs.lse is None else inputs.lse.copy_(lse)
