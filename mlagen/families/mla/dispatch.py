"""MLA decode calls: their steps, and what is cached of them."""

from __future__ import annotations

from operator import attrgetter

from mlagen.families.common.dispatch import Dispatcher
from mlagen.families.common.memory import check_memory
from mlagen.families.mla.args import MlaArgs, canonical_numbers
from mlagen.families.mla.launch import make_sm80_launcher, make_sm90_launcher
from mlagen.families.mla.plan import shape_of
from mlagen.families.mla.problem import MlaProblem, check_contents, check_problem
from mlagen.families.mla.reference import decode_mla


class MlaFamily:
    """The steps of an MLA call."""

    check_contents = staticmethod(check_contents)
    shape_of = staticmethod(shape_of)
    kernel_of = staticmethod(attrgetter("mla_kernel"))
    sm90_launcher = staticmethod(make_sm90_launcher)
    sm80_launcher = staticmethod(make_sm80_launcher)
    compute = staticmethod(decode_mla)

    @staticmethod
    def validate(args: MlaArgs) -> tuple[MlaArgs, MlaProblem]:
        """Return the arguments with built-in Python numbers, and the problem."""
        args = canonical_numbers(args)
        check_memory(args)
        return args, check_problem(args)


MLA = Dispatcher(MlaFamily())
