"""MLA decode calls: checked and planned once for each form of the arguments, then only launched."""

from __future__ import annotations

import math
import struct
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mlagen.api.arguments import ALIGNMENT_BYTES, require
from mlagen.api.mla_contents import check_contents
from mlagen.api.mla_form import form_of
from mlagen.api.mla_inputs import MlaInputs
from mlagen.api.mla_plan import plan_call
from mlagen.api.mla_request import MlaRequest, check_pointers, check_request
from mlagen.api.reference import decode_mla
from mlagen.engine import kernel_for
from mlagen.errors import UnsupportedError
from mlagen.runtime.launch import launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.plan import DecodePlan
from mlagen.settings import current_settings
from mlagen.spec.combine import CombineSplitsSpec
from mlagen.spec.mla import MlaDecodeSpec
from mlagen.spec.mla_support import output_dtype

# Forms of arguments that are remembered; a server sees a few for each batch size.
_MOST_CALLS = 8192

_calls: dict[Hashable, MlaCall] = {}


@dataclass(frozen=True, kw_only=True)
class MlaCall:
    """A form of arguments that is sound, with its kernels loaded and its launch planned."""

    request: MlaRequest
    plan: DecodePlan
    decode: LoadedKernel
    combine: LoadedKernel | None
    combine_blocks: int
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


def _prepare(inputs: MlaInputs, request: MlaRequest) -> MlaCall:
    if request.device.type != "cuda":
        raise UnsupportedError(
            f"{inputs.names.query}.device: expected cuda or cpu, got {request.device}"
        )
    index = request.device.index
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
    given = inputs.workspace_buffer.numel() * inputs.workspace_buffer.element_size()
    require(
        given >= plan.workspace_bytes,
        inputs.names.workspace_buffer,
        f"{plan.workspace_bytes} bytes or more for this call",
        f"{given} bytes",
    )
    combine = combine_spec(spec)
    return MlaCall(
        request=request,
        plan=plan,
        decode=kernel_for(spec, index),
        combine=kernel_for(combine, index) if plan.splits > 1 else None,
        combine_blocks=request.tokens * request.heads * combine.slices,
        layout=_layout(inputs, request, spec, plan),
        is_plain=_is_plain(inputs),
    )


def combine_spec(spec: MlaDecodeSpec) -> CombineSplitsSpec:
    """Return the kernel that combines the splits of a decode kernel."""
    return CombineSplitsSpec(
        arch=spec.arch,
        dtype=output_dtype(spec.variant.query_dtype),
        head_dim_vo=spec.head_dim_vo,
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
    bmm1_tensor, bmm1_scale = _scale(inputs.bmm1_scale)
    bmm2_tensor, bmm2_scale = _scale(inputs.bmm2_scale)
    sinks = inputs.sinks.data_ptr() if inputs.sinks is not None else 0
    lse_pointer = lse.data_ptr() if lse is not None else 0
    lse_factor = math.log(2) if inputs.return_lse_base == "basee" else 1.0
    # The partial rows come first, then their LSE.
    partial_lse = workspace + plan.partial_rows * request.variant.kv_lora_rank * 4
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
            1.0,
            lse_factor,
        )
    return out, lse


def _scale(scale: float | torch.Tensor) -> tuple[int, float]:
    """Return a pointer and a value, of which the kernel takes the pointer if there is one."""
    if isinstance(scale, torch.Tensor):
        return scale.data_ptr(), 0.0
    return 0, scale


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
