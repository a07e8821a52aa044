"""MLA decode calls: checked and planned once for each form of the arguments, then only launched."""

from __future__ import annotations

import struct

import torch

from mlagen.api.calls import RememberedCalls, require_gpu
from mlagen.api.mla_contents import check_contents
from mlagen.api.mla_form import form_of
from mlagen.api.mla_hopper import HopperCall, prepare_hopper
from mlagen.api.mla_hopper_packed import PackedCall
from mlagen.api.mla_inputs import MlaInputs
from mlagen.api.mla_portable import PortableCall, prepare_portable
from mlagen.api.mla_request import MlaRequest, check_request
from mlagen.api.reference import decode_mla
from mlagen.settings import Settings, current_settings

MlaCall = PortableCall | HopperCall | PackedCall

_calls: RememberedCalls[MlaCall] = RememberedCalls()


def run_mla(inputs: MlaInputs, enable_pdl: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute one call; returns the output and, if asked for, the LSE."""
    settings = current_settings()
    form = form_of(inputs, settings.mla_kernel, settings.mla_probabilities)
    call = _calls.find(form)
    request = check_request(inputs) if call is None else call.request
    if call is None and request.device.type != "cpu":
        call = _calls.keep(form, _prepare(inputs, request, settings))
    if settings.checks_contents:
        check_contents(inputs, request)
    return _run_on_cpu(inputs, request) if call is None else _run_on_gpu(call, inputs, enable_pdl)


def _prepare(inputs: MlaInputs, request: MlaRequest, settings: Settings) -> MlaCall:
    """Choose the kernel."""
    index = require_gpu(request.device, inputs.names.query)
    if settings.mla_kernel != "portable":
        call = prepare_hopper(inputs, request, index, settings)
        if call is not None:
            return call
    return prepare_portable(inputs, request, index)


def _run_on_gpu(
    call: MlaCall, inputs: MlaInputs, enable_pdl: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    request = call.request
    out, lse = inputs.out, inputs.lse if inputs.return_lse else None
    if out is None:
        out = torch.empty(request.out_shape, dtype=request.out_dtype, device=request.device)
    if lse is None and inputs.return_lse:
        lse = torch.empty(request.lse_shape, dtype=torch.float32, device=request.device)
    if call.plan.blocks == 0 or request.tokens == 0:
        return out, lse
    try:
        call.launch(inputs, out, lse, enable_pdl)
    except (OverflowError, struct.error):  # a number beyond 4 bytes; nothing has been launched
        check_request(inputs)
        raise
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
