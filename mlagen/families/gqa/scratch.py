"""Scratch of grouped-query calls whose signature has no workspace."""

from __future__ import annotations

import torch

from mlagen.families.common.launchers import Computed
from mlagen.families.dispatch import GQA
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.workspace import call_workspace_bytes


def with_scratch(args: GqaArgs) -> GqaArgs:
    """Return the arguments with a new workspace that suffices, whichever kernel serves the call.

    Their own is empty. Every replay allocates another one.
    """
    device = args.query.device
    size = call_workspace_bytes(GQA.family, args) if device.type == "cuda" else 0

    def scratch(*_: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.empty(size, dtype=torch.uint8, device=device),)

    computed = Computed(scratch(), scratch)
    return args._replace(workspace_buffer=computed.tensors[0], computed=computed)
