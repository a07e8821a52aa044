"""Grouped-query decode calls: checked and planned once for each form of the arguments."""

from __future__ import annotations

import struct
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from mlagen.api.arguments import ALIGNMENT_BYTES
from mlagen.api.calls import (
    CombineCall,
    RememberedCalls,
    combine_call,
    facts_of,
    length_form,
    require_gpu,
    require_room,
    rounded_up,
    scale_of,
)
from mlagen.api.gqa_contents import check_contents
from mlagen.api.gqa_inputs import GqaInputs
from mlagen.api.gqa_plan import plan_gqa_call
from mlagen.api.gqa_pointers import MASK_ALIGNMENT_BYTES, alignment_of, check_pointers
from mlagen.api.gqa_reference import decode_gqa
from mlagen.api.gqa_request import GqaRequest, check_request
from mlagen.engine import kernel_for
from mlagen.runtime.launch import launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.plan import DecodePlan
from mlagen.settings import current_settings
from mlagen.spec.combine import CombineSplitsSpec
from mlagen.spec.dtype import DType
from mlagen.spec.gqa import GqaDecodeSpec
from mlagen.spec.kernel import packed_integers

_calls: RememberedCalls[GqaCall] = RememberedCalls()


@dataclass(frozen=True, kw_only=True)
class GqaCall:
    """A form of arguments that is sound, with its kernels loaded and its launch planned."""

    request: GqaRequest
    plan: DecodePlan
    decode: LoadedKernel
    combine: CombineCall | None
    layout: bytes  # the integers of the decode kernel's parameters
    cache_alignment: int  # bytes


def run_gqa(inputs: GqaInputs, enable_pdl: bool) -> torch.Tensor:
    """Compute one call; returns the output."""
    form = _form_of(inputs)
    call = _calls.find(form)
    request = check_request(inputs) if call is None else call.request
    if call is None and request.device.type != "cpu":
        call = _calls.keep(form, _prepare(inputs, request))
    if current_settings().checks_contents:
        check_contents(inputs, request)
    return _run_on_cpu(inputs, request) if call is None else _run_on_gpu(call, inputs, enable_pdl)


def _form_of(inputs: GqaInputs) -> Hashable:
    """Return everything about the arguments that a check or a plan may depend on.

    Written out, for it runs at every call. None if something is not of the kind it should be,
    which :func:`check_request` then says.
    """
    query, key, value, workspace, tables, seq_lens, longest = inputs[:7]
    q_len, layout, window, out, bmm1_scale, bmm2_scale, factor_16bit, factor_e4m3 = inputs[7:15]
    sinks, mask, cumulative, key_scales, value_scales, with_beam_axis, like_xqa, _ = inputs[15:]
    try:
        return (
            (query.shape, query.stride(), query.dtype, query.get_device()),
            (key.shape, key.stride(), key.dtype, key.get_device()),
            None
            if value is None
            else (value.shape, value.stride(), value.dtype, value.get_device()),
            (workspace.shape, workspace.stride(), workspace.dtype, workspace.get_device()),
            (tables.shape, tables.stride(), tables.dtype, tables.get_device()),
            (seq_lens.shape, seq_lens.stride(), seq_lens.dtype, seq_lens.get_device()),
            rounded_up(longest) if longest.__class__ is int else length_form(longest),
            # The class, for a float or a bool that equals an int is none.
            (q_len, q_len.__class__, layout, window, with_beam_axis, like_xqa),
            None if out is None else (out.shape, out.stride(), out.dtype, out.get_device()),
            float if bmm1_scale.__class__ is float else facts_of(bmm1_scale),
            float if bmm2_scale.__class__ is float else facts_of(bmm2_scale),
            (factor_16bit.__class__, factor_e4m3.__class__),
            None if sinks is None else facts_of(sinks),
            None if mask is None else facts_of(mask),
            None if cumulative is None else facts_of(cumulative),
            None if key_scales is None else (facts_of(key_scales), facts_of(value_scales)),
        )
    except (AttributeError, TypeError, ValueError):
        return None


def _prepare(inputs: GqaInputs, request: GqaRequest) -> GqaCall:
    names = inputs.names
    index = require_gpu(request.device, names.query)
    spec, plan = plan_gqa_call(
        device=index,
        variant=request.variant,
        batch=request.batch,
        q_len=request.q_len,
        is_ragged=request.is_ragged,
        tokens=request.tokens,
        heads=request.heads,
        kv_heads=request.kv_heads,
        window=int(inputs.window),
        longest_kv=int(inputs.max_seq_len),
    )
    require_room(inputs.workspace_buffer, names.workspace_buffer, plan.workspace_bytes)
    combine_spec = CombineSplitsSpec(
        arch=spec.arch, dtype=spec.variant.out_dtype, head_dim_vo=spec.variant.head_dim
    )
    return GqaCall(
        request=request,
        plan=plan,
        decode=kernel_for(spec, index),
        combine=combine_call(
            combine_spec, plan, tokens=request.tokens, heads=request.heads, device=index
        ),
        layout=_layout(spec, request, plan),
        cache_alignment=alignment_of(inputs.key_cache),
    )


def _layout(spec: GqaDecodeSpec, request: GqaRequest, plan: DecodePlan) -> bytes:
    steps = ("page_stride", "token_stride", "head_stride")
    values = {
        "query_stride": request.query_stride,
        "query_head_stride": request.query_head_stride,
        "total_rows": request.tokens * request.heads,
        "requests": request.batch,
        "kv_heads": request.kv_heads,
        "group": request.group,
        "q_len": 0 if request.is_ragged else request.q_len,
        "mask_words": request.mask_words,
        "window": request.window,
        "max_pages": request.max_pages,
        "block_tables_stride": request.block_tables_stride,
        "num_pages": request.num_pages,
        "row_tiles": plan.row_tiles,
        "splits": plan.splits,
        "scores_take_bmm2": int(request.scores_take_bmm2),
    }
    for part in ("key", "value", "key_scale", "value_scale"):
        strides = getattr(request, f"{part}_strides")
        values |= {f"{part}_{step}": stride for step, stride in zip(steps, strides, strict=True)}
    return packed_integers(spec, values)


def _run_on_gpu(call: GqaCall, inputs: GqaInputs, enable_pdl: bool) -> torch.Tensor:
    request, plan = call.request, call.plan
    out = inputs.out
    if out is None:
        out = torch.empty(request.out_shape, dtype=request.out_dtype, device=request.device)
    if plan.blocks == 0 or request.tokens == 0:
        return out

    query = inputs.query.data_ptr()
    key = inputs.key_cache.data_ptr()
    value = inputs.value_cache
    value_pointer = key + request.value_offset if value is None else value.data_ptr()
    workspace = inputs.workspace_buffer.data_ptr()
    out_pointer = out.data_ptr()
    mask = inputs.mask
    mask_pointer = mask.data_ptr() if mask is not None and request.mask_words else 0
    if (
        (query | workspace | out_pointer) % ALIGNMENT_BYTES
        or (key | value_pointer) % call.cache_alignment
        or mask_pointer % MASK_ALIGNMENT_BYTES
    ):
        check_pointers(inputs)
    key_scales = value_scales = 0
    if inputs.key_scales is not None:
        key_scales = inputs.key_scales.data_ptr()
        value_scales = key_scales + request.value_scale_offset
        if inputs.value_scales is not None:
            value_scales = inputs.value_scales.data_ptr()
    bmm1_tensor, bmm1_scale = scale_of(inputs.bmm1_scale)
    bmm2_tensor, bmm2_scale = scale_of(inputs.bmm2_scale) if request.takes_bmm2 else (0, 1.0)
    is_e4m3 = request.variant.out_dtype is DType.E4M3
    factor = inputs.out_e4m3_factor if is_e4m3 else inputs.out_16bit_factor
    sinks = inputs.sinks.data_ptr() if inputs.sinks is not None else 0
    combine = call.combine
    partial_lse = workspace if combine is None else workspace + combine.lse_offset
    try:
        launch(
            call.decode,
            plan.blocks,
            enable_pdl,
            query,
            key,
            value_pointer,
            key_scales,
            value_scales,
            inputs.block_tables.data_ptr(),
            inputs.seq_lens.data_ptr(),
            inputs.cum_seq_lens_q.data_ptr() if inputs.cum_seq_lens_q is not None else 0,
            mask_pointer,
            bmm1_tensor,
            bmm2_tensor,
            sinks,
            out_pointer,
            workspace,
            partial_lse,
            call.layout,
            bmm1_scale,
            bmm2_scale,
            request.score_factor,
            factor,
        )
    except (OverflowError, struct.error):  # a number beyond 4 bytes; nothing has been launched
        check_request(inputs)
        raise
    if combine is not None:
        launch(
            combine.kernel,
            combine.blocks,
            enable_pdl,
            workspace,
            partial_lse,
            bmm2_tensor,
            sinks,
            out_pointer,
            0,
            combine.layout,
            bmm2_scale,
            factor,
            1.0,
        )
    return out


def _run_on_cpu(inputs: GqaInputs, request: GqaRequest) -> torch.Tensor:
    out = decode_gqa(inputs, request).view(request.out_shape)
    return out if inputs.out is None else inputs.out.copy_(out)
