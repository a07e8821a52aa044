"""Grouped-query decode calls: checked and planned once for each call signature."""

from __future__ import annotations

from operator import attrgetter

from mlagen.families.common.dispatch import DecodeCalls
from mlagen.families.gqa.args import GqaArgs, canonical_numbers, signature_of
from mlagen.families.gqa.debug_checks import check_contents
from mlagen.families.gqa.launch import make_sm80_launcher, make_sm90_launcher
from mlagen.families.gqa.problem import GqaProblem, check_problem
from mlagen.families.gqa.reference import decode_gqa
from mlagen.families.gqa.select import shape_of

GQA: DecodeCalls[GqaArgs, GqaProblem] = DecodeCalls(
    canonical=canonical_numbers,
    signature_of=signature_of,
    validate=check_problem,
    check_contents=check_contents,
    shape_of=shape_of,
    kernel_of=attrgetter("gqa_kernel"),
    make_sm90_launcher=make_sm90_launcher,
    make_sm80_launcher=make_sm80_launcher,
    compute=decode_gqa,
)
