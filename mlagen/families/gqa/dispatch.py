"""Grouped-query decode calls: checked and planned once for each call signature."""

from __future__ import annotations

import torch

from mlagen.families.common.choice_log import log_choice, log_declined
from mlagen.families.common.dispatch import DecodeCalls
from mlagen.families.common.launchers import require_gpu
from mlagen.families.common.outputs import OutputSpec
from mlagen.families.gqa.args import GqaArgs, canonical_numbers, signature_of
from mlagen.families.gqa.debug_checks import check_contents
from mlagen.families.gqa.launch_sm80 import GqaSm80Launcher, make_sm80_launcher
from mlagen.families.gqa.launch_sm90 import GqaSm90Launcher, make_sm90_launcher
from mlagen.families.gqa.problem import GqaProblem, check_problem
from mlagen.families.gqa.reference import decode_gqa
from mlagen.runtime.partition import WHOLE_GPU
from mlagen.settings import Settings

GqaLauncher = GqaSm80Launcher | GqaSm90Launcher


def plan_call(
    args: GqaArgs, problem: GqaProblem, settings: Settings, sms: int = WHOLE_GPU
) -> GqaLauncher:
    """Choose the kernel for a context of ``sms`` SMs, and return its launcher."""
    kernel = settings.gqa_kernel
    index = require_gpu(problem.device, args.names.query)
    sms = max(sms, WHOLE_GPU)  # a grid needs no cooperation
    launcher: GqaLauncher | None = None
    if kernel == "sm80":
        log_declined("MLAGEN_GQA_KERNEL=sm80")
    else:
        launcher = make_sm90_launcher(args, problem, index, sms, is_forced=kernel == "sm90")
    launcher = launcher or make_sm80_launcher(args, problem, index, sms)
    log_choice(
        launcher.decode.spec,
        launcher.plan,
        requests=problem.batch,
        rows=problem.max_q_len * problem.group_size,
        max_kv_len=args.max_seq_len,
    )
    return launcher


def outputs_of(args: GqaArgs, problem: GqaProblem) -> list[OutputSpec]:
    """Return the requested outputs."""
    out = OutputSpec("out", args.out, problem.out_shape, problem.out_dtype)
    lse = OutputSpec("lse", args.lse, problem.lse_shape, torch.float32)
    return [out, lse] if args.return_lse else [out]


GQA: DecodeCalls[GqaArgs, GqaProblem] = DecodeCalls(
    canonical=canonical_numbers,
    signature_of=signature_of,
    validate=check_problem,
    check_contents=check_contents,
    plan=plan_call,
    outputs_of=outputs_of,
    compute=decode_gqa,
)
