"""Grouped-query decode calls: their steps, and what is cached of them."""

from __future__ import annotations

from operator import attrgetter

from mlagen.families.common.dispatch import Dispatcher
from mlagen.families.common.memory import check_memory
from mlagen.families.gqa.args import GqaArgs, canonical_numbers
from mlagen.families.gqa.launch import make_sm80_launcher, make_sm90_launcher
from mlagen.families.gqa.plan import shape_of
from mlagen.families.gqa.problem import GqaProblem, check_contents, check_problem
from mlagen.families.gqa.reference import decode_gqa


class GqaFamily:
    """The steps of a grouped-query call."""

    check_contents = staticmethod(check_contents)
    shape_of = staticmethod(shape_of)
    kernel_of = staticmethod(attrgetter("gqa_kernel"))
    sm90_launcher = staticmethod(make_sm90_launcher)
    sm80_launcher = staticmethod(make_sm80_launcher)
    compute = staticmethod(decode_gqa)

    @staticmethod
    def validate(args: GqaArgs) -> tuple[GqaArgs, GqaProblem]:
        """Return the arguments with built-in Python numbers, and the problem."""
        args = canonical_numbers(args)
        check_memory(args)
        return args, check_problem(args)


GQA = Dispatcher(GqaFamily())
