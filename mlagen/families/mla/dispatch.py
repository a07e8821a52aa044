"""MLA decode calls: checked and planned once for each call signature, then only launched."""

from __future__ import annotations

from operator import attrgetter

import torch

from mlagen.families.common.arguments import canonical_sinks
from mlagen.families.common.dispatch import DecodeCalls, call_missed
from mlagen.families.mla.args import MlaArgs, canonical_numbers, key_of_args, signature_of
from mlagen.families.mla.debug_checks import check_contents
from mlagen.families.mla.launch import make_sm80_launcher, make_sm90_launcher
from mlagen.families.mla.problem import MlaProblem, check_problem
from mlagen.families.mla.reference import decode_mla
from mlagen.families.mla.select import shape_of

MLA: DecodeCalls[MlaArgs, MlaProblem] = DecodeCalls(
    canonical=canonical_numbers,
    signature_of=signature_of,
    validate=check_problem,
    check_contents=check_contents,
    shape_of=shape_of,
    kernel_of=attrgetter("mla_kernel"),
    make_sm90_launcher=make_sm90_launcher,
    make_sm80_launcher=make_sm80_launcher,
    compute=decode_mla,
)


def run_mla(args: MlaArgs, enable_pdl: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute a call whose arguments another module made; returns output and requested LSE."""
    args = args._replace(sinks=canonical_sinks(args.sinks))
    key = key_of_args(*args)
    outputs = None if key is None else MLA.replay(*key)
    out, *lse = outputs or call_missed(key, MLA.dispatch, args, enable_pdl)
    return out, lse[0] if lse else None
