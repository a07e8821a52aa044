"""MLA decode calls: checked and planned once for each call signature, then only launched."""

from __future__ import annotations

import struct
from collections.abc import Hashable

import torch

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.families.common.arg_parts import ArgPartsByType
from mlagen.families.common.call_cache import CallCache, FastPathKey
from mlagen.families.common.choice_log import log_choice, log_declined
from mlagen.families.common.launchers import require_gpu, rounded_up
from mlagen.families.common.memory import check_memory
from mlagen.families.common.no_backward import record_output, record_write, tensors_of, wants_grad
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.debug_checks import check_contents
from mlagen.families.mla.launch_sm80 import MlaSm80Launcher, make_sm80_launcher
from mlagen.families.mla.launch_sm90 import MlaSm90Launcher, make_sm90_launcher
from mlagen.families.mla.launch_sm90_fp8kv import MlaSm90Fp8KvLauncher
from mlagen.families.mla.numbers import canonical_numbers
from mlagen.families.mla.problem import MlaProblem, check_problem
from mlagen.families.mla.reference import decode_mla
from mlagen.families.mla.signature import call_signature
from mlagen.runtime.partition import (
    NO_COOPERATION,
    WHOLE_GPU,
    TooManyCtasError,
    partition_of,
    record_rejection,
)
from mlagen.settings import Settings, current_settings

MlaCall = MlaSm80Launcher | MlaSm90Launcher | MlaSm90Fp8KvLauncher

_calls: CallCache[MlaCall] = CallCache()

_MAX_SEQ_LEN = MlaArgs._fields.index("max_seq_len")
_parts = ArgPartsByType(_MAX_SEQ_LEN)


def try_replay(
    key: tuple[Hashable, ...],
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[float, ...],
    out: torch.Tensor | None,
    enable_pdl: bool,
) -> torch.Tensor | FastPathKey[MlaCall] | None:
    """Replay a cached call and return its output, or return its fast-path key.

    ``key`` is all that the call signature depends on except the ``tensors``, and ``numbers`` are
    the scalars passed to the kernels. Calls with an LSE do not use this path.
    """
    settings = current_settings()
    key = (settings.mla_kernel, settings.mla_p_dtype, *key)
    if sms := partition_of(tensors[0]):
        key = (sms, *key)
    if settings.checks_contents:
        return _calls.make_key(key, tensors)
    try:
        return _calls.try_replay(key, tensors, numbers, out, enable_pdl, _new_out)
    except TooManyCtasError as error:
        record_rejection(error)
        return None


def run_mla(
    args: MlaArgs, enable_pdl: bool, fast_path: FastPathKey[MlaCall] | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute one call, by the fast path if it has an entry; returns output and requested LSE."""
    try:
        return _run(args, enable_pdl, fast_path, partition_of(args.query))
    except TooManyCtasError as error:
        record_rejection(error)
    return run_mla(args, enable_pdl)  # planned for the available SMs, or for the sm80 kernel


def _run(
    args: MlaArgs, enable_pdl: bool, fast_path: FastPathKey[MlaCall] | None, sms: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    settings = current_settings()
    if fast_path is None:
        fast_path = _lookup_by_parts(args, settings, sms)
    if fast_path is None or fast_path.entry is None:
        canonical = canonical_numbers(args)
        if canonical is not args:
            args, fast_path = canonical, _lookup_by_parts(canonical, settings, sms)
    if fast_path is None or fast_path.entry is None:
        return _run_by_signature(args, enable_pdl, fast_path, sms)
    call = fast_path.entry.call
    if settings.checks_contents:
        check_contents(args, call.problem)
    return _run_on_gpu(call, args, enable_pdl, fast_path)


def _run_by_signature(
    args: MlaArgs, enable_pdl: bool, fast_path: FastPathKey[MlaCall] | None, sms: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute a call with canonical numbers that no guarded entry accepts."""
    settings = current_settings()
    signature = call_signature(args, settings.mla_kernel, settings.mla_p_dtype)
    if sms and signature is not None:
        signature = (sms, signature)
    call = _calls.find(signature)
    if call is None or not _calls.is_valid(signature, fast_path):
        check_memory(args)
        if wants_grad(args):
            return _run_with_grad(args, enable_pdl)
    if call is not None and fast_path is not None:
        _calls.find(signature, fast_path)
    problem = check_problem(args) if call is None else call.problem
    if call is None and problem.device.type != "cpu":
        call = _calls.store(signature, _prepare(args, problem, settings, sms), fast_path)
    if settings.checks_contents:
        check_contents(args, problem)
    if call is None:
        return _run_on_cpu(args, problem)
    return _run_on_gpu(call, args, enable_pdl, fast_path)


def _lookup_by_parts(args: MlaArgs, settings: Settings, sms: int) -> FastPathKey[MlaCall] | None:
    """Return the fast-path key of a call without an entry point's key, from all its arguments."""
    parts = _parts.find(args)
    if parts is None:
        return None
    max_len = args[_MAX_SEQ_LEN]
    key = (
        parts,
        settings.mla_kernel,
        settings.mla_p_dtype,
        sms,
        rounded_up(max_len) if args.bias is None else max_len,  # a bias must cover max_len
        parts.key_values_of(args),
        args.latent_scale == 1.0,  # few dtypes support other scales
        args.rope_scale == 1.0,
    )
    tensors, numbers = parts.tensors_of(args), parts.floats_of(args)
    return _calls.lookup_by_parts(
        key, tensors, numbers, caches_launches=not settings.checks_contents
    )


def _run_with_grad(args: MlaArgs, enable_pdl: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute a call with a tensor that requires grad: its outputs require grad too."""
    check_problem(args)
    tensors, names = tensors_of(args), args.names
    given_lse = args.lse if args.return_lse else None
    for output, name in ((args.out, names.out), (given_lse, names.lse)):
        if output is not None:
            record_write(output, name, tensors)
    with torch.no_grad():
        out, lse = run_mla(args, enable_pdl)
    if args.out is None:
        out = record_output(out, tensors)
    if lse is not None and given_lse is None:
        lse = record_output(lse, tensors)
    return out, lse


def _prepare(
    args: MlaArgs, problem: MlaProblem, settings: Settings, sms: int = WHOLE_GPU
) -> MlaCall:
    """Choose the kernel, for a context of ``sms`` SMs."""
    index = require_gpu(problem.device, args.names.query)
    is_forced = settings.mla_kernel == "sm90"
    if sms == NO_COOPERATION and is_forced:
        raise UnsupportedError(
            "MLAGEN_MLA_KERNEL=sm90: expected a context whose SMs hold all CTAs at once, got "
            "one in which the driver rejects them; unset it to take the sm80 kernel"
        )
    call: MlaCall | None = None
    if settings.mla_kernel == "sm80":
        log_declined("MLAGEN_MLA_KERNEL=sm80")
    elif sms == NO_COOPERATION:
        log_declined("the driver rejects a cooperative grid in this context")
    else:
        try:
            call = make_sm90_launcher(args, problem, index, settings, sms)
        except ArgumentError as error:
            # A workspace sized for the whole GPU must suffice.
            if sms == WHOLE_GPU or is_forced:
                raise
            log_declined(str(error))
    call = call or make_sm80_launcher(args, problem, index)
    log_choice(
        call.decode.spec,
        call.plan,
        requests=problem.tokens if problem.top_k else problem.batch,
        rows=(1 if problem.top_k else problem.tile_q_len) * problem.heads,
        max_kv_len=problem.top_k or int(args.max_seq_len),
    )
    return call


def _run_on_gpu(
    call: MlaCall, args: MlaArgs, enable_pdl: bool, fast_path: FastPathKey[MlaCall] | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    problem = call.problem
    out = args.out if fast_path is None or fast_path.out is None else fast_path.out
    lse = args.lse if args.return_lse else None
    allocated: tuple[torch.Tensor, ...] = ()
    if out is None:
        out = _new_out(call)
        allocated = (out,)
    if lse is None and args.return_lse:
        lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=problem.device)
        allocated += (lse,)
    if call.plan.num_ctas == 0 or problem.tokens == 0:
        return out, lse
    launch_key = None if fast_path is None else fast_path.launch_key
    if launch_key is not None and fast_path is not None and fast_path.out is None:
        launch_key += tuple(tensor.data_ptr() for tensor in allocated)
        if _calls.replay_launches(launch_key, enable_pdl):
            return out, lse
    try:
        launches = call.launch(args, out, lse, enable_pdl)
    except (OverflowError, struct.error):  # a number exceeds 4 bytes; nothing was launched
        check_problem(args)
        raise
    if launch_key is not None:
        _calls.store_launches(launch_key, launches)
    return out, lse


def _new_out(call: MlaCall) -> torch.Tensor:
    problem = call.problem
    return torch.empty(problem.out_shape, dtype=problem.out_dtype, device=problem.device)


def _run_on_cpu(args: MlaArgs, problem: MlaProblem) -> tuple[torch.Tensor, torch.Tensor | None]:
    out, lse = decode_mla(args, problem)
    if args.out is not None:
        out = args.out.copy_(out.view(problem.out_shape))
    else:
        out = out.view(problem.out_shape)
    if not args.return_lse:
        return out, None
    lse = lse.view(problem.lse_shape)
    return out, lse if args.lse is None else args.lse.copy_(lse)
