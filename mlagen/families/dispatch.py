"""MLA and grouped-query decode calls: their steps, and what is cached of them."""

from __future__ import annotations

from operator import attrgetter

from mlagen.families.common.dispatch import Dispatcher, Family
from mlagen.families.gqa import args as gqa_args
from mlagen.families.gqa import contents as gqa_contents
from mlagen.families.gqa import launch as gqa_launch
from mlagen.families.gqa import plan as gqa_plan
from mlagen.families.gqa import problem as gqa_problem
from mlagen.families.gqa.reference import decode_gqa
from mlagen.families.mla import args as mla_args
from mlagen.families.mla import contents as mla_contents
from mlagen.families.mla import launch as mla_launch
from mlagen.families.mla import plan as mla_plan
from mlagen.families.mla import problem as mla_problem
from mlagen.families.mla.reference import decode_mla

MLA = Dispatcher(
    Family(
        canonical_numbers=mla_args.canonical_numbers,
        check_problem=mla_problem.check_problem,
        check_contents=mla_contents.check_contents,
        shape_of=mla_plan.shape_of,
        kernel_of=attrgetter("mla_kernel"),
        sm90_launcher=mla_launch.make_sm90_launcher,
        launcher_of=mla_launch.launcher_of,
        compute=decode_mla,
    )
)
GQA = Dispatcher(
    Family(
        canonical_numbers=gqa_args.canonical_numbers,
        check_problem=gqa_problem.check_problem,
        check_contents=gqa_contents.check_contents,
        shape_of=gqa_plan.shape_of,
        kernel_of=attrgetter("gqa_kernel"),
        sm90_launcher=gqa_launch.make_sm90_launcher,
        launcher_of=gqa_launch.launcher_of,
        compute=decode_gqa,
    )
)
