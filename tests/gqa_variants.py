"""Variants of a problem: the same cache and queries under other windows, sinks and masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import torch

from tests.gqa_problems import GqaProblem, result_tolerance
from tests.reference import assert_close

LAYOUTS = ("NHD", "HND")


def variants(
    problem: GqaProblem,
    *,
    windows: Sequence[int] = (0,),
    sinks: Sequence[bool] = (True,),
    masks: Sequence[str | None] = (None,),
) -> Iterator[tuple[str, GqaProblem]]:
    """Return every combination by name; the problem must have sinks."""
    case = problem.case
    for window, has_sinks, mask in product(windows, sinks, masks):
        # The mask bits do not depend on the cache.
        bare = replace(case, seq_lens=(0,) * len(case.seq_lens), sink=None, mask=mask)
        name = f"window {window}, {'sinks' if has_sinks else 'no sinks'}, {mask or 'no'} mask"
        changed = replace(
            problem,
            case=replace(case, window=window, mask=mask),
            sinks=problem.sinks if has_sinks else None,
            bits=bare.build("cpu").bits,
        )
        yield name, changed


def check_all(
    problem: GqaProblem,
    runs: Mapping[str, Callable[[GqaProblem], torch.Tensor]],
    what: str = "",
    *,
    layouts: Sequence[str] = LAYOUTS,
) -> None:
    """Fail unless every run of a problem, in every layout of its cache, is right."""
    expected = problem.expected()
    for layout, (name, run) in product(layouts, runs.items()):
        out = run(replace(problem, case=replace(problem.case, layout=layout)))
        assert out.dtype is problem.case.result_dtype
        tolerance = result_tolerance(problem.case.dtype, out.dtype, expected)
        label = f"{what}, {layout}, {name}: out"
        assert_close(out.float().reshape(expected.out.shape), expected.out, tolerance, label)
