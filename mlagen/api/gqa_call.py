"""Grouped-query decode calls: checked and planned once for each form of the arguments."""

from __future__ import annotations

import struct
from collections.abc import Hashable

import torch

from mlagen.api.calls import require_gpu, rounded_up
from mlagen.api.choice_log import log_choice, log_declined
from mlagen.api.gqa_contents import check_contents
from mlagen.api.gqa_form import form_of
from mlagen.api.gqa_hopper import HopperGqaCall, prepare_hopper
from mlagen.api.gqa_inputs import GqaInputs
from mlagen.api.gqa_numbers import with_plain_numbers
from mlagen.api.gqa_portable import PortableGqaCall, prepare_portable
from mlagen.api.gqa_reference import decode_gqa
from mlagen.api.gqa_request import GqaRequest, check_request
from mlagen.api.input_parts import PartsByClasses
from mlagen.api.memory import check_memory
from mlagen.api.no_backward import record_write, recorded, tensors_of, wants_grad
from mlagen.api.remembered import RememberedCalls, Usual
from mlagen.settings import Settings, current_settings

GqaCall = PortableGqaCall | HopperGqaCall

_calls: RememberedCalls[GqaCall] = RememberedCalls()

_LONGEST = GqaInputs._fields.index("max_seq_len")
_parts = PartsByClasses(_LONGEST)


def run_again(
    key: tuple[Hashable, ...],
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[float, ...],
    out: torch.Tensor | None,
    enable_pdl: bool,
) -> torch.Tensor | Usual[GqaCall] | None:
    """Return the output of a usual call that was made before, or what to remember it by.

    ``key`` is all that the form of the arguments depends on but what the ``tensors`` are like, and
    ``numbers`` what is passed to the kernels beside them.
    """
    settings = current_settings()
    key = (settings.gqa_kernel, *key)
    if settings.checks_contents:
        return _calls.find_unlaunched(key, tensors)
    return _calls.run_again(key, tensors, numbers, out, enable_pdl, _new_out)


def run_gqa(
    inputs: GqaInputs, enable_pdl: bool, usual: Usual[GqaCall] | None = None
) -> torch.Tensor:
    """Compute one call, which may be a usual one; returns the output."""
    settings = current_settings()
    if usual is None:
        usual = _find_alike(inputs, settings)
    if usual is None or usual.recent is None:
        plain = with_plain_numbers(inputs)
        if plain is not inputs:
            inputs, usual = plain, _find_alike(plain, settings)
    if usual is None or usual.recent is None:
        return _run_by_form(inputs, enable_pdl, usual)
    call = usual.recent.call
    if settings.checks_contents:
        check_contents(inputs, call.request)
    return _run_on_gpu(call, inputs, enable_pdl, usual)


def _run_by_form(inputs: GqaInputs, enable_pdl: bool, usual: Usual[GqaCall] | None) -> torch.Tensor:
    """Compute a call of plain numbers that is like no recent one."""
    settings = current_settings()
    form = form_of(inputs, settings.gqa_kernel)
    call = _calls.find(form)
    if call is None or not _calls.is_sound(form, usual):
        check_memory(inputs)
        if wants_grad(inputs):
            return _run_recorded(inputs, enable_pdl)
    if call is not None and usual is not None:
        _calls.find(form, usual)
    request = check_request(inputs) if call is None else call.request
    if call is None and request.device.type != "cpu":
        call = _calls.keep(form, _prepare(inputs, request, settings.gqa_kernel), usual)
    if settings.checks_contents:
        check_contents(inputs, request)
    if call is None:
        return _run_on_cpu(inputs, request)
    return _run_on_gpu(call, inputs, enable_pdl, usual)


def _find_alike(inputs: GqaInputs, settings: Settings) -> Usual[GqaCall] | None:
    """Return a call that no entry point has a key for, by all that its form depends on."""
    parts = _parts.find(inputs)
    if parts is None:
        return None
    longest = rounded_up(inputs[_LONGEST])
    key = (parts, settings.gqa_kernel, longest, parts.words_of(inputs))
    tensors, numbers = parts.tensors_of(inputs), parts.floats_of(inputs)
    return _calls.find_alike(key, tensors, numbers, is_launched=not settings.checks_contents)


def _run_recorded(inputs: GqaInputs, enable_pdl: bool) -> torch.Tensor:
    """Compute a call of which a tensor requires grad: its output does so too."""
    check_request(inputs)
    tensors = tensors_of(inputs)
    if inputs.out is not None:
        record_write(inputs.out, inputs.names.out, tensors)
    with torch.no_grad():
        out = run_gqa(inputs, enable_pdl)
    return out if inputs.out is not None else recorded(out, tensors)


def _prepare(inputs: GqaInputs, request: GqaRequest, kernel: str) -> GqaCall:
    """Choose the kernel; ``kernel`` is what the settings ask for."""
    index = require_gpu(request.device, inputs.names.query)
    call: GqaCall | None = None
    if kernel == "portable":
        log_declined("MLAGEN_GQA_KERNEL=portable")
    else:
        call = prepare_hopper(inputs, request, index, is_forced=kernel == "hopper")
    call = call or prepare_portable(inputs, request, index)
    log_choice(
        call.decode.spec,
        call.plan,
        requests=request.batch,
        rows=request.q_len * (request.heads // request.kv_heads),
        longest_kv=int(inputs.max_seq_len),
    )
    return call


def _run_on_gpu(
    call: GqaCall, inputs: GqaInputs, enable_pdl: bool, usual: Usual[GqaCall] | None = None
) -> torch.Tensor:
    out = inputs.out if usual is None or usual.out is None else usual.out
    made: tuple[int, ...] = ()
    if out is None:
        out = _new_out(call)
        made = (out.data_ptr(),)
    if call.plan.blocks == 0 or call.request.tokens == 0:
        return out
    passed = None if usual is None else usual.passed
    if passed is not None and usual is not None and usual.out is None:
        passed += made
        if _calls.relaunch(passed, enable_pdl):
            return out
    try:
        launches = call.launch(inputs, out, enable_pdl)
    except (OverflowError, struct.error):  # a number beyond 4 bytes; nothing has been launched
        check_request(inputs)
        raise
    if passed is not None:
        _calls.keep_launches(passed, launches)
    return out


def _new_out(call: GqaCall) -> torch.Tensor:
    request = call.request
    return torch.empty(request.out_shape, dtype=request.out_dtype, device=request.device)


def _run_on_cpu(inputs: GqaInputs, request: GqaRequest) -> torch.Tensor:
    out = decode_gqa(inputs, request).view(request.out_shape)
    return out if inputs.out is None else inputs.out.copy_(out)
