"""MLA decode calls: checked and planned once for each call signature, then only launched."""

from __future__ import annotations

import torch

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.families.common.arguments import canonical_sinks
from mlagen.families.common.choice_log import log_choice, log_declined
from mlagen.families.common.dispatch import DecodeCalls, call_missed
from mlagen.families.common.launchers import require_gpu
from mlagen.families.common.outputs import OutputSpec
from mlagen.families.mla.args import MlaArgs, canonical_numbers, key_of_args, signature_of
from mlagen.families.mla.debug_checks import check_contents
from mlagen.families.mla.launch_sm80 import MlaSm80Launcher, make_sm80_launcher
from mlagen.families.mla.launch_sm90 import MlaSm90Launcher, make_sm90_launcher
from mlagen.families.mla.problem import MlaProblem, check_problem
from mlagen.families.mla.reference import decode_mla
from mlagen.runtime.partition import NO_COOPERATION, WHOLE_GPU
from mlagen.settings import Settings

MlaLauncher = MlaSm80Launcher | MlaSm90Launcher


def plan_call(
    args: MlaArgs, problem: MlaProblem, settings: Settings, sms: int = WHOLE_GPU
) -> MlaLauncher:
    """Choose the kernel for a context of ``sms`` SMs, and return its launcher."""
    index = require_gpu(problem.device, args.names.query)
    is_forced = settings.mla_kernel == "sm90"
    if sms == NO_COOPERATION and is_forced:
        raise UnsupportedError(
            "MLAGEN_MLA_KERNEL=sm90: expected a context whose SMs hold all CTAs at once, got "
            "one in which the driver rejects them; unset it to take the sm80 kernel"
        )
    launcher: MlaLauncher | None = None
    if settings.mla_kernel == "sm80":
        log_declined("MLAGEN_MLA_KERNEL=sm80")
    elif sms == NO_COOPERATION:
        log_declined("the driver rejects a cooperative grid in this context")
    else:
        try:
            launcher = make_sm90_launcher(args, problem, index, settings, sms)
        except ArgumentError as error:
            # A workspace sized for the whole GPU must suffice.
            if sms == WHOLE_GPU or is_forced:
                raise
            log_declined(str(error))
    launcher = launcher or make_sm80_launcher(args, problem, index, max(sms, WHOLE_GPU))
    log_choice(
        launcher.decode.spec,
        launcher.plan,
        requests=problem.tokens if problem.top_k else problem.batch,
        rows=(1 if problem.top_k else problem.tile_q_len) * problem.heads,
        max_kv_len=problem.top_k or args.max_seq_len,
    )
    return launcher


def outputs_of(args: MlaArgs, problem: MlaProblem) -> list[OutputSpec]:
    """Return the requested outputs."""
    out = OutputSpec("out", args.out, problem.out_shape, problem.out_dtype)
    lse = OutputSpec("lse", args.lse, problem.lse_shape, torch.float32)
    return [out, lse] if args.return_lse else [out]


MLA: DecodeCalls[MlaArgs, MlaProblem] = DecodeCalls(
    canonical=canonical_numbers,
    signature_of=signature_of,
    validate=check_problem,
    check_contents=check_contents,
    plan=plan_call,
    outputs_of=outputs_of,
    compute=decode_mla,
)


def run_mla(args: MlaArgs, enable_pdl: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute a call whose arguments another module made; returns output and requested LSE."""
    args = args._replace(sinks=canonical_sinks(args.sinks))
    key = key_of_args(*args)
    outputs = None if key is None else MLA.replay(*key)
    out, *lse = outputs or call_missed(key, MLA.dispatch, args, enable_pdl)
    return out, lse[0] if lse else None
