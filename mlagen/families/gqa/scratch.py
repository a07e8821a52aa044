"""Scratch of grouped-query calls whose signature has no workspace."""

from __future__ import annotations

import torch

from mlagen.families.common.launchers import Computed
from mlagen.families.common.memory import check_memory
from mlagen.families.gqa.args import GqaArgs, canonical_numbers
from mlagen.families.gqa.plan import plan_gqa_sm80_call, plan_gqa_sm90_call, shape_of
from mlagen.families.gqa.problem import GqaProblem, check_problem


def with_scratch(args: GqaArgs) -> GqaArgs:
    """Return the arguments with a new workspace that suffices, whichever kernel serves the call.

    Their own is empty. Every replay allocates another one.
    """
    device, size = args.query.device, 0
    if device.type == "cuda":
        check_memory(args)
        size = _needed(args, check_problem(canonical_numbers(args)))

    def scratch(*_: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.empty(size, dtype=torch.uint8, device=device),)

    computed = Computed(scratch(), scratch)
    return args._replace(workspace_buffer=computed.tensors[0], computed=computed)


def _needed(args: GqaArgs, problem: GqaProblem) -> int:
    call = (problem.device.index, problem.variant, shape_of(args, problem))
    of_sm80 = plan_gqa_sm80_call(*call)[1].workspace_bytes
    planned = plan_gqa_sm90_call(*call)
    return max(of_sm80, 0 if planned is None else planned[1].workspace_bytes)
