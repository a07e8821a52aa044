"""Grouped-query decode calls: checked and planned once for each call signature."""

from __future__ import annotations

import struct
from collections.abc import Hashable

import torch

from mlagen.families.common.arg_parts import ArgPartsByType
from mlagen.families.common.call_cache import CallCache, FastPathKey
from mlagen.families.common.choice_log import log_choice, log_declined
from mlagen.families.common.launchers import require_gpu, rounded_up
from mlagen.families.common.memory import check_memory
from mlagen.families.common.no_backward import record_output, record_write, tensors_of, wants_grad
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.debug_checks import check_contents
from mlagen.families.gqa.launch_sm80 import GqaSm80Launcher, make_sm80_launcher
from mlagen.families.gqa.launch_sm90 import GqaSm90Launcher, make_sm90_launcher
from mlagen.families.gqa.numbers import canonical_numbers
from mlagen.families.gqa.problem import GqaProblem, check_problem
from mlagen.families.gqa.reference import decode_gqa
from mlagen.families.gqa.signature import call_signature
from mlagen.settings import Settings, current_settings

GqaCall = GqaSm80Launcher | GqaSm90Launcher

_calls: CallCache[GqaCall] = CallCache()

_MAX_SEQ_LEN = GqaArgs._fields.index("max_seq_len")
_parts = ArgPartsByType(_MAX_SEQ_LEN)


def try_replay(
    key: tuple[Hashable, ...],
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[float, ...],
    out: torch.Tensor | None,
    enable_pdl: bool,
) -> torch.Tensor | FastPathKey[GqaCall] | None:
    """Replay a cached call and return its output, or return its fast-path key.

    ``key`` is all that the call signature depends on except the ``tensors``, and ``numbers`` are
    the scalars passed to the kernels.
    """
    settings = current_settings()
    key = (settings.gqa_kernel, *key)
    if settings.checks_contents:
        return _calls.make_key(key, tensors)
    return _calls.try_replay(key, tensors, numbers, out, enable_pdl, _new_out)


def run_gqa(
    args: GqaArgs, enable_pdl: bool, fast_path: FastPathKey[GqaCall] | None = None
) -> torch.Tensor:
    """Compute one call, by the fast path if it has an entry; returns the output."""
    settings = current_settings()
    if fast_path is None:
        fast_path = _lookup_by_parts(args, settings)
    if fast_path is None or fast_path.entry is None:
        canonical = canonical_numbers(args)
        if canonical is not args:
            args, fast_path = canonical, _lookup_by_parts(canonical, settings)
    if fast_path is None or fast_path.entry is None:
        return _run_by_signature(args, enable_pdl, fast_path)
    call = fast_path.entry.call
    if settings.checks_contents:
        check_contents(args, call.problem)
    return _run_on_gpu(call, args, enable_pdl, fast_path)


def _run_by_signature(
    args: GqaArgs, enable_pdl: bool, fast_path: FastPathKey[GqaCall] | None
) -> torch.Tensor:
    """Compute a call with canonical numbers that no guarded entry accepts."""
    settings = current_settings()
    signature = call_signature(args, settings.gqa_kernel)
    call = _calls.find(signature)
    if call is None or not _calls.is_valid(signature, fast_path):
        check_memory(args)
        if wants_grad(args):
            return _run_with_grad(args, enable_pdl)
    if call is not None and fast_path is not None:
        _calls.find(signature, fast_path)
    problem = check_problem(args) if call is None else call.problem
    if call is None and problem.device.type != "cpu":
        call = _calls.store(signature, _prepare(args, problem, settings.gqa_kernel), fast_path)
    if settings.checks_contents:
        check_contents(args, problem)
    if call is None:
        return _run_on_cpu(args, problem)
    return _run_on_gpu(call, args, enable_pdl, fast_path)


def _lookup_by_parts(args: GqaArgs, settings: Settings) -> FastPathKey[GqaCall] | None:
    """Return the fast-path key of a call without an entry point's key, from all its arguments."""
    parts = _parts.find(args)
    if parts is None:
        return None
    max_len = rounded_up(args[_MAX_SEQ_LEN])
    key = (parts, settings.gqa_kernel, max_len, parts.key_values_of(args))
    tensors, numbers = parts.tensors_of(args), parts.floats_of(args)
    return _calls.lookup_by_parts(
        key, tensors, numbers, caches_launches=not settings.checks_contents
    )


def _run_with_grad(args: GqaArgs, enable_pdl: bool) -> torch.Tensor:
    """Compute a call with a tensor that requires grad: its output requires grad too."""
    check_problem(args)
    tensors = tensors_of(args)
    if args.out is not None:
        record_write(args.out, args.names.out, tensors)
    with torch.no_grad():
        out = run_gqa(args, enable_pdl)
    return out if args.out is not None else record_output(out, tensors)


def _prepare(args: GqaArgs, problem: GqaProblem, kernel: str) -> GqaCall:
    """Choose the kernel; ``kernel`` is the one that the settings request."""
    index = require_gpu(problem.device, args.names.query)
    call: GqaCall | None = None
    if kernel == "sm80":
        log_declined("MLAGEN_GQA_KERNEL=sm80")
    else:
        call = make_sm90_launcher(args, problem, index, is_forced=kernel == "sm90")
    call = call or make_sm80_launcher(args, problem, index)
    log_choice(
        call.decode.spec,
        call.plan,
        requests=problem.batch,
        rows=problem.q_len * (problem.heads // problem.kv_heads),
        max_kv_len=int(args.max_seq_len),
    )
    return call


def _run_on_gpu(
    call: GqaCall, args: GqaArgs, enable_pdl: bool, fast_path: FastPathKey[GqaCall] | None = None
) -> torch.Tensor:
    out = args.out if fast_path is None or fast_path.out is None else fast_path.out
    allocated: tuple[int, ...] = ()
    if out is None:
        out = _new_out(call)
        allocated = (out.data_ptr(),)
    if call.plan.num_ctas == 0 or call.problem.tokens == 0:
        return out
    launch_key = None if fast_path is None else fast_path.launch_key
    if launch_key is not None and fast_path is not None and fast_path.out is None:
        launch_key += allocated
        if _calls.replay_launches(launch_key, enable_pdl):
            return out
    try:
        launches = call.launch(args, out, enable_pdl)
    except (OverflowError, struct.error):  # a number exceeds 4 bytes; nothing was launched
        check_problem(args)
        raise
    if launch_key is not None:
        _calls.store_launches(launch_key, launches)
    return out


def _new_out(call: GqaCall) -> torch.Tensor:
    problem = call.problem
    return torch.empty(problem.out_shape, dtype=problem.out_dtype, device=problem.device)


def _run_on_cpu(args: GqaArgs, problem: GqaProblem) -> torch.Tensor:
    out = decode_gqa(args, problem).view(problem.out_shape)
    return out if args.out is None else args.out.copy_(out)
