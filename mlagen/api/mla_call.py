"""MLA decode calls: checked and planned once for each form of the arguments, then only launched."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mlagen.api.arguments import ALIGNMENT_BYTES
from mlagen.api.calls import (
    CombineCall,
    RememberedCalls,
    combine_call,
    require_gpu,
    require_room,
    scale_of,
)
from mlagen.api.mla_contents import check_contents
from mlagen.api.mla_form import form_of
from mlagen.api.mla_inputs import MlaInputs
from mlagen.api.mla_plan import plan_call
from mlagen.api.mla_request import MlaRequest, check_pointers, check_request
from mlagen.api.reference import decode_mla
from mlagen.engine import kernel_for
from mlagen.runtime.launch import launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.plan import DecodePlan
from mlagen.settings import current_settings
from mlagen.spec.combine import CombineSplitsSpec
from mlagen.spec.mla import MlaDecodeSpec

_calls: RememberedCalls[MlaCall] = RememberedCalls()


@dataclass(frozen=True, kw_only=True)
class MlaCall:
    """A form of arguments that is sound, with its kernels loaded and its launch planned."""

    request: MlaRequest
    plan: DecodePlan
    decode: LoadedKernel
    combine: CombineCall | None
    layout: tuple[int, ...]  # the integer fields of the decode kernel's parameters
    is_plain: bool  # none of what :class:`_RarePointers` names is used


class _RarePointers(NamedTuple):
    """Addresses of what few calls use, 0 where it is not used."""

    query_rope: int
    rope_cache: int
    query_scales: int = 0
    value_cache: int = 0
    kv_scales: int = 0
    value_tables: int = 0
    table_starts: int = 0
    top_k_lens: int = 0
    bias: int = 0


def run_mla(inputs: MlaInputs, enable_pdl: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute one call; returns the output and, if asked for, the LSE."""
    form = form_of(inputs)
    call = _calls.find(form)
    request = check_request(inputs) if call is None else call.request
    if call is None and request.device.type != "cpu":
        call = _calls.keep(form, _prepare(inputs, request))
    if current_settings().checks_contents:
        check_contents(inputs, request)
    return _run_on_cpu(inputs, request) if call is None else _run_on_gpu(call, inputs, enable_pdl)


def _prepare(inputs: MlaInputs, request: MlaRequest) -> MlaCall:
    index = require_gpu(request.device, inputs.names.query)
    spec, plan = plan_call(
        device=index,
        variant=request.variant,
        batch=request.batch,
        q_len=request.q_len,
        tile_q_len=request.tile_q_len,
        tokens=request.tokens,
        heads=request.heads,
        longest_kv=request.top_k or int(inputs.max_seq_len),
    )
    require_room(inputs.workspace_buffer, inputs.names.workspace_buffer, plan)
    combine_spec = CombineSplitsSpec(
        arch=spec.arch, dtype=spec.out_dtype, head_dim_vo=spec.head_dim_vo
    )
    return MlaCall(
        request=request,
        plan=plan,
        decode=kernel_for(spec, index),
        combine=combine_call(
            combine_spec, plan, tokens=request.tokens, heads=request.heads, device=index
        ),
        layout=_layout(inputs, request, spec, plan),
        is_plain=_is_plain(inputs),
    )


def _is_plain(inputs: MlaInputs) -> bool:
    rare = _rare_pointers(inputs, query_rope=0, rope_cache=0, value_tables=0)
    return not any(rare)


def _layout(
    inputs: MlaInputs, request: MlaRequest, spec: MlaDecodeSpec, plan: DecodePlan
) -> tuple[int, ...]:
    values = {
        **request.strides,
        "total_rows": request.tokens * request.heads,
        "requests": request.batch,
        "heads": request.heads,
        "q_len": request.q_len,
        "max_pages": request.max_pages,
        "num_pages": request.num_pages,
        "row_tiles": plan.row_tiles,
        "splits": plan.splits,
        "top_k": request.top_k,
        "is_causal": int(inputs.is_causal),
        "scores_take_bmm2": int(inputs.scores_take_bmm2),
    }
    return tuple(values[field.name] for field in spec.parameters if field.code in "qi")


def _rare_pointers(
    inputs: MlaInputs, *, query_rope: int, rope_cache: int, value_tables: int
) -> _RarePointers:
    """Return the addresses; the three given are those in tensors of other parts."""
    value_cache = _pointer(inputs.value_cache)
    return _RarePointers(
        query_rope=_pointer(inputs.query_rope) or query_rope,
        rope_cache=_pointer(inputs.rope_cache) or rope_cache,
        query_scales=_pointer(inputs.query_scales),
        value_cache=value_cache,
        kv_scales=_pointer(inputs.kv_scales),
        value_tables=value_tables if value_cache else 0,
        table_starts=_pointer(inputs.table_starts),
        top_k_lens=_pointer(inputs.top_k_lens),
        bias=_pointer(inputs.bias),
    )


def _pointer(tensor: torch.Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None else 0


def _run_on_gpu(
    call: MlaCall, inputs: MlaInputs, enable_pdl: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    request, plan = call.request, call.plan
    out, lse = inputs.out, inputs.lse if inputs.return_lse else None
    if out is None:
        out = torch.empty(request.out_shape, dtype=request.out_dtype, device=request.device)
    if lse is None and inputs.return_lse:
        lse = torch.empty(request.lse_shape, dtype=torch.float32, device=request.device)
    if plan.blocks == 0 or request.tokens == 0:
        return out, lse

    query = inputs.query.data_ptr()
    cache = inputs.kv_cache.data_ptr()
    tables = inputs.block_tables.data_ptr()
    workspace = inputs.workspace_buffer.data_ptr()
    out_pointer = out.data_ptr()
    query_rope = query + request.query_rope_offset
    rope_cache = cache + request.rope_cache_offset
    if call.is_plain:
        rare = _RarePointers(query_rope, rope_cache)
    else:
        rare = _rare_pointers(
            inputs,
            query_rope=query_rope,
            rope_cache=rope_cache,
            value_tables=tables + request.value_tables_offset,
        )
    query_rope, rope_cache, query_scales, value_cache, kv_scales = rare[:5]
    beginnings = query | query_rope | cache | rope_cache | value_cache | workspace | out_pointer
    if beginnings % ALIGNMENT_BYTES:
        check_pointers(inputs)
    bmm1_tensor, bmm1_scale = scale_of(inputs.bmm1_scale)
    bmm2_tensor, bmm2_scale = scale_of(inputs.bmm2_scale)
    sinks = inputs.sinks.data_ptr() if inputs.sinks is not None else 0
    lse_pointer = lse.data_ptr() if lse is not None else 0
    lse_factor = math.log(2) if inputs.return_lse_base == "basee" else 1.0
    combine = call.combine
    partial_lse = workspace if combine is None else workspace + combine.lse_offset
    try:
        launch(
            call.decode,
            plan.blocks,
            enable_pdl,
            query,
            query_rope,
            query_scales,
            cache,
            rope_cache,
            value_cache,
            kv_scales,
            tables,
            rare.value_tables,
            rare.table_starts,
            inputs.seq_lens.data_ptr(),
            inputs.cum_seq_lens_q.data_ptr() if inputs.cum_seq_lens_q is not None else 0,
            rare.top_k_lens,
            rare.bias,
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
            inputs.latent_scale,
            inputs.rope_scale,
            lse_factor,
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
            lse_pointer,
            *combine.sizes,
            bmm2_scale,
            1.0,
            lse_factor,
        )
    return out, lse


def _run_on_cpu(inputs: MlaInputs, request: MlaRequest) -> tuple[torch.Tensor, torch.Tensor | None]:
    out, lse = decode_mla(inputs, request)
    if inputs.out is not None:
        out = inputs.out.copy_(out.view(request.out_shape))
    else:
        out = out.view(request.out_shape)
    if not inputs.return_lse:
        return out, None
    lse = lse.view(request.lse_shape)
    return out, lse if inputs.lse is None else inputs.lse.copy_(lse)
