"""Grouped-query decode calls: checked and planned once for each form of the arguments."""

from __future__ import annotations

import struct
from collections.abc import Hashable

import torch

from mlagen.api.calls import (
    RememberedCalls,
    facts_of,
    length_form,
    require_gpu,
    rounded_up,
)
from mlagen.api.gqa_contents import check_contents
from mlagen.api.gqa_hopper import HopperGqaCall, prepare_hopper
from mlagen.api.gqa_inputs import GqaInputs
from mlagen.api.gqa_portable import PortableGqaCall, prepare_portable
from mlagen.api.gqa_reference import decode_gqa
from mlagen.api.gqa_request import GqaRequest, check_request
from mlagen.settings import current_settings

GqaCall = PortableGqaCall | HopperGqaCall

_calls: RememberedCalls[GqaCall] = RememberedCalls()


def run_gqa(inputs: GqaInputs, enable_pdl: bool) -> torch.Tensor:
    """Compute one call; returns the output."""
    settings = current_settings()
    form = _form_of(inputs, settings.gqa_kernel)
    call = _calls.find(form)
    request = check_request(inputs) if call is None else call.request
    if call is None and request.device.type != "cpu":
        call = _calls.keep(form, _prepare(inputs, request, settings.gqa_kernel))
    if settings.checks_contents:
        check_contents(inputs, request)
    return _run_on_cpu(inputs, request) if call is None else _run_on_gpu(call, inputs, enable_pdl)


def _form_of(inputs: GqaInputs, kernel: str) -> Hashable:
    """Return everything about the arguments that a check or a plan may depend on.

    ``kernel`` is what the settings ask for. Written out, for it runs at every call. None if
    something is not of the kind it should be, which :func:`check_request` then says.
    """
    query, key, value, workspace, tables, seq_lens, longest = inputs[:7]
    q_len, layout, window, out, bmm1_scale, bmm2_scale, factor_16bit, factor_e4m3 = inputs[7:15]
    sinks, mask, cumulative, key_scales, value_scales, with_beam_axis, like_xqa, _ = inputs[15:]
    try:
        return (
            kernel,
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


def _prepare(inputs: GqaInputs, request: GqaRequest, kernel: str) -> GqaCall:
    """Choose the kernel; ``kernel`` is what the settings ask for."""
    index = require_gpu(request.device, inputs.names.query)
    if kernel != "portable":
        call = prepare_hopper(inputs, request, index, is_forced=kernel == "hopper")
        if call is not None:
            return call
    return prepare_portable(inputs, request, index)


def _run_on_gpu(call: GqaCall, inputs: GqaInputs, enable_pdl: bool) -> torch.Tensor:
    request, out = call.request, inputs.out
    if out is None:
        out = torch.empty(request.out_shape, dtype=request.out_dtype, device=request.device)
    if call.plan.blocks == 0 or request.tokens == 0:
        return out
    try:
        call.launch(inputs, out, enable_pdl)
    except (OverflowError, struct.error):  # a number beyond 4 bytes; nothing has been launched
        check_request(inputs)
        raise
    return out


def _run_on_cpu(inputs: GqaInputs, request: GqaRequest) -> torch.Tensor:
    out = decode_gqa(inputs, request).view(request.out_shape)
    return out if inputs.out is None else inputs.out.copy_(out)
