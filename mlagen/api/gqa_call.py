"""Grouped-query decode calls: checked and planned once for each form of the arguments."""

from __future__ import annotations

import struct
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from mlagen.api.arguments import ALIGNMENT_BYTES, require
from mlagen.api.gqa_contents import check_contents
from mlagen.api.gqa_inputs import GqaInputs
from mlagen.api.gqa_plan import plan_gqa_call
from mlagen.api.gqa_pointers import MASK_ALIGNMENT_BYTES, alignment_of, check_pointers
from mlagen.api.gqa_reference import decode_gqa
from mlagen.api.gqa_request import GqaRequest, check_request
from mlagen.api.mla_plan import length_form, rounded_up
from mlagen.engine import kernel_for
from mlagen.errors import UnsupportedError
from mlagen.runtime.launch import launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.plan import DecodePlan
from mlagen.settings import current_settings
from mlagen.spec.combine import CombineSplitsSpec
from mlagen.spec.dtype import DType
from mlagen.spec.gqa import GqaDecodeSpec

# Forms of arguments that are remembered; a server sees a few for each batch size.
_MOST_CALLS = 8192

_calls: dict[Hashable, GqaCall] = {}


@dataclass(frozen=True, kw_only=True)
class GqaCall:
    """A form of arguments that is sound, with its kernels loaded and its launch planned."""

    request: GqaRequest
    plan: DecodePlan
    decode: LoadedKernel
    combine: LoadedKernel | None
    combine_blocks: int
    layout: tuple[int, ...]  # the integer fields of the decode kernel's parameters
    cache_alignment: int  # bytes
    partial_lse_offset: int  # bytes: the partial rows come first, then their LSE


def run_gqa(inputs: GqaInputs, enable_pdl: bool) -> torch.Tensor:
    """Compute one call; returns the output."""
    form = _form_of(inputs)
    try:
        call = _calls.get(form) if form is not None else None
    except TypeError:  # something in it cannot be hashed, such as a list; check_request refuses it
        call = None
    if call is None:
        request = check_request(inputs)
        if request.device.type == "cpu":
            if current_settings().checks_contents:
                check_contents(inputs, request)
            return _run_on_cpu(inputs, request)
        call = _prepare(inputs, request)
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        _calls[form] = call
    if current_settings().checks_contents:
        check_contents(inputs, call.request)
    return _run_on_gpu(call, inputs, enable_pdl)


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
            float if bmm1_scale.__class__ is float else _facts(bmm1_scale),
            float if bmm2_scale.__class__ is float else _facts(bmm2_scale),
            (factor_16bit.__class__, factor_e4m3.__class__),
            None if sinks is None else _facts(sinks),
            None if mask is None else _facts(mask),
            None if cumulative is None else _facts(cumulative),
            None if key_scales is None else (_facts(key_scales), _facts(value_scales)),
        )
    except (AttributeError, TypeError, ValueError):
        return None


def _facts(value: object) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.get_device()
    return type(value).__name__


def _prepare(inputs: GqaInputs, request: GqaRequest) -> GqaCall:
    names = inputs.names
    if request.device.type != "cuda":
        raise UnsupportedError(f"{names.query}.device: expected cuda or cpu, got {request.device}")
    index = request.device.index
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
        longest_kv=rounded_up(int(inputs.max_seq_len)),
    )
    given = inputs.workspace_buffer.numel() * inputs.workspace_buffer.element_size()
    require(
        given >= plan.workspace_bytes,
        names.workspace_buffer,
        f"{plan.workspace_bytes} bytes or more for this call",
        f"{given} bytes",
    )
    combine_spec = CombineSplitsSpec(
        arch=spec.arch, dtype=spec.variant.out_dtype, head_dim_vo=spec.variant.head_dim
    )
    return GqaCall(
        request=request,
        plan=plan,
        decode=kernel_for(spec, index),
        combine=kernel_for(combine_spec, index) if plan.splits > 1 else None,
        combine_blocks=request.tokens * request.heads * combine_spec.slices,
        layout=_layout(spec, request, plan),
        cache_alignment=alignment_of(inputs.key_cache),
        partial_lse_offset=plan.partial_rows * spec.variant.head_dim * 4,
    )


def _layout(spec: GqaDecodeSpec, request: GqaRequest, plan: DecodePlan) -> tuple[int, ...]:
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
    return tuple(values[field.name] for field in spec.parameters if field.code in "qi")


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
    bmm1_tensor, bmm1_scale = _scale(inputs.bmm1_scale)
    bmm2_tensor, bmm2_scale = _scale(inputs.bmm2_scale) if request.takes_bmm2 else (0, 1.0)
    is_e4m3 = request.variant.out_dtype is DType.E4M3
    factor = inputs.out_e4m3_factor if is_e4m3 else inputs.out_16bit_factor
    sinks = inputs.sinks.data_ptr() if inputs.sinks is not None else 0
    partial_lse = workspace + call.partial_lse_offset
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
            *call.layout,
            bmm1_scale,
            bmm2_scale,
            request.score_factor,
            factor,
        )
    except (OverflowError, struct.error):  # a number beyond 4 bytes; nothing has been launched
        check_request(inputs)
        raise
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
            0,
            request.tokens * request.heads,
            request.heads,
            plan.splits,
            bmm2_scale,
            factor,
            1.0,
        )
    return out


def _scale(scale: float | torch.Tensor) -> tuple[int, float]:
    """Return a pointer and a value, of which the kernel takes the pointer if there is one."""
    if isinstance(scale, torch.Tensor):
        return scale.data_ptr(), 0.0
    return 0, scale


def _run_on_cpu(inputs: GqaInputs, request: GqaRequest) -> torch.Tensor:
    out = decode_gqa(inputs, request).view(request.out_shape)
    return out if inputs.out is None else inputs.out.copy_(out)
