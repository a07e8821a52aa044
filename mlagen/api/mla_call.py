"""MLA decode calls: checked and planned once for each form of the arguments, then only launched."""

from __future__ import annotations

import struct
from collections.abc import Hashable

import torch

from mlagen.api.calls import require_gpu, rounded_up
from mlagen.api.choice_log import log_choice, log_declined
from mlagen.api.input_parts import PartsByClasses
from mlagen.api.memory import check_memory
from mlagen.api.mla_contents import check_contents
from mlagen.api.mla_form import form_of
from mlagen.api.mla_hopper import HopperCall, prepare_hopper
from mlagen.api.mla_hopper_packed import PackedCall
from mlagen.api.mla_inputs import MlaInputs
from mlagen.api.mla_numbers import with_plain_numbers
from mlagen.api.mla_portable import PortableCall, prepare_portable
from mlagen.api.mla_request import MlaRequest, check_request
from mlagen.api.no_backward import record_write, recorded, tensors_of, wants_grad
from mlagen.api.reference import decode_mla
from mlagen.api.remembered import RememberedCalls, Usual
from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.runtime.partition import (
    NO_COOPERATION,
    WHOLE_GPU,
    TooManyBlocksError,
    note_rejection,
    partition_of,
)
from mlagen.settings import Settings, current_settings

MlaCall = PortableCall | HopperCall | PackedCall

_calls: RememberedCalls[MlaCall] = RememberedCalls()

_LONGEST = MlaInputs._fields.index("max_seq_len")
_parts = PartsByClasses(_LONGEST)


def run_again(
    key: tuple[Hashable, ...],
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[float, ...],
    out: torch.Tensor | None,
    enable_pdl: bool,
) -> torch.Tensor | Usual[MlaCall] | None:
    """Return the output of a usual call that was made before, or what to remember it by.

    ``key`` is all that the form of the arguments depends on but what the ``tensors`` are like, and
    ``numbers`` what is passed to the kernels beside them. No such call has an LSE.
    """
    settings = current_settings()
    key = (settings.mla_kernel, settings.mla_probabilities, *key)
    if sms := partition_of(tensors[0]):
        key = (sms, *key)
    if settings.checks_contents:
        return _calls.find_unlaunched(key, tensors)
    try:
        return _calls.run_again(key, tensors, numbers, out, enable_pdl, _new_out)
    except TooManyBlocksError as error:
        note_rejection(error)
        return None


def run_mla(
    inputs: MlaInputs, enable_pdl: bool, usual: Usual[MlaCall] | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute one call, which may be a usual one; returns the output and, if asked for, the LSE."""
    try:
        return _run(inputs, enable_pdl, usual, partition_of(inputs.query))
    except TooManyBlocksError as error:
        note_rejection(error)
    return run_mla(inputs, enable_pdl)  # for the SMs that there are, or without cooperation


def _run(
    inputs: MlaInputs, enable_pdl: bool, usual: Usual[MlaCall] | None, sms: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    settings = current_settings()
    if usual is None:
        usual = _find_alike(inputs, settings, sms)
    if usual is None or usual.recent is None:
        plain = with_plain_numbers(inputs)
        if plain is not inputs:
            inputs, usual = plain, _find_alike(plain, settings, sms)
    if usual is None or usual.recent is None:
        return _run_by_form(inputs, enable_pdl, usual, sms)
    call = usual.recent.call
    if settings.checks_contents:
        check_contents(inputs, call.request)
    return _run_on_gpu(call, inputs, enable_pdl, usual)


def _run_by_form(
    inputs: MlaInputs, enable_pdl: bool, usual: Usual[MlaCall] | None, sms: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute a call of plain numbers that is like no recent one."""
    settings = current_settings()
    form = form_of(inputs, settings.mla_kernel, settings.mla_probabilities)
    if sms and form is not None:
        form = (sms, form)
    call = _calls.find(form)
    if call is None or not _calls.is_sound(form, usual):
        check_memory(inputs)
        if wants_grad(inputs):
            return _run_recorded(inputs, enable_pdl)
    if call is not None and usual is not None:
        _calls.find(form, usual)
    request = check_request(inputs) if call is None else call.request
    if call is None and request.device.type != "cpu":
        call = _calls.keep(form, _prepare(inputs, request, settings, sms), usual)
    if settings.checks_contents:
        check_contents(inputs, request)
    if call is None:
        return _run_on_cpu(inputs, request)
    return _run_on_gpu(call, inputs, enable_pdl, usual)


def _find_alike(inputs: MlaInputs, settings: Settings, sms: int) -> Usual[MlaCall] | None:
    """Return a call that no entry point has a key for, by all that its form depends on."""
    parts = _parts.find(inputs)
    if parts is None:
        return None
    longest = inputs[_LONGEST]
    key = (
        parts,
        settings.mla_kernel,
        settings.mla_probabilities,
        sms,
        rounded_up(longest) if inputs.bias is None else longest,  # which a bias must cover
        parts.words_of(inputs),
        inputs.latent_scale == 1.0,  # others are for few dtypes
        inputs.rope_scale == 1.0,
    )
    tensors, numbers = parts.tensors_of(inputs), parts.floats_of(inputs)
    return _calls.find_alike(key, tensors, numbers, is_launched=not settings.checks_contents)


def _run_recorded(inputs: MlaInputs, enable_pdl: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute a call of which a tensor requires grad: its outputs do so too."""
    check_request(inputs)
    tensors, names = tensors_of(inputs), inputs.names
    given_lse = inputs.lse if inputs.return_lse else None
    for output, name in ((inputs.out, names.out), (given_lse, names.lse)):
        if output is not None:
            record_write(output, name, tensors)
    with torch.no_grad():
        out, lse = run_mla(inputs, enable_pdl)
    if inputs.out is None:
        out = recorded(out, tensors)
    if lse is not None and given_lse is None:
        lse = recorded(lse, tensors)
    return out, lse


def _prepare(
    inputs: MlaInputs, request: MlaRequest, settings: Settings, sms: int = WHOLE_GPU
) -> MlaCall:
    """Choose the kernel, for a context of ``sms`` SMs."""
    index = require_gpu(request.device, inputs.names.query)
    is_forced = settings.mla_kernel == "hopper"
    if sms == NO_COOPERATION and is_forced:
        raise UnsupportedError(
            "MLAGEN_MLA_KERNEL=hopper: expected a context whose SMs hold all blocks at once, got "
            "one in which the driver rejects them; unset it to take the portable kernel"
        )
    call: MlaCall | None = None
    if settings.mla_kernel == "portable":
        log_declined("MLAGEN_MLA_KERNEL=portable")
    elif sms == NO_COOPERATION:
        log_declined("the driver rejects a cooperative grid in this context")
    else:
        try:
            call = prepare_hopper(inputs, request, index, settings, sms)
        except ArgumentError as error:
            # A workspace that is large enough for the plans of the whole GPU is enough.
            if sms == WHOLE_GPU or is_forced:
                raise
            log_declined(str(error))
    call = call or prepare_portable(inputs, request, index)
    log_choice(
        call.decode.spec,
        call.plan,
        requests=request.tokens if request.top_k else request.batch,
        rows=(1 if request.top_k else request.tile_q_len) * request.heads,
        longest_kv=request.top_k or int(inputs.max_seq_len),
    )
    return call


def _run_on_gpu(
    call: MlaCall, inputs: MlaInputs, enable_pdl: bool, usual: Usual[MlaCall] | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    request = call.request
    out = inputs.out if usual is None or usual.out is None else usual.out
    lse = inputs.lse if inputs.return_lse else None
    made: tuple[torch.Tensor, ...] = ()
    if out is None:
        out = _new_out(call)
        made = (out,)
    if lse is None and inputs.return_lse:
        lse = torch.empty(request.lse_shape, dtype=torch.float32, device=request.device)
        made += (lse,)
    if call.plan.blocks == 0 or request.tokens == 0:
        return out, lse
    passed = None if usual is None else usual.passed
    if passed is not None and usual is not None and usual.out is None:
        passed += tuple(tensor.data_ptr() for tensor in made)
        if _calls.relaunch(passed, enable_pdl):
            return out, lse
    try:
        launches = call.launch(inputs, out, lse, enable_pdl)
    except (OverflowError, struct.error):  # a number beyond 4 bytes; nothing has been launched
        check_request(inputs)
        raise
    if passed is not None:
        _calls.keep_launches(passed, launches)
    return out, lse


def _new_out(call: MlaCall) -> torch.Tensor:
    request = call.request
    return torch.empty(request.out_shape, dtype=request.out_dtype, device=request.device)


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
