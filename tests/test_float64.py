"""Every element of every entry point against float64, for every device.

NaN and invalid page ids in all memory that must not be read affect no result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch

from tests.problems.batch_decode import decode_planned
from tests.problems.batch_mla import run_with_lse, wrapper_of
from tests.problems.entry_points import (
    ENTRY_POINTS,
    compute,
    decode_gqa_with_lse,
    run_xqa_with_lse,
    trtllm_gqa_with_lse,
)
from tests.problems.flare import FORMS, decode, flare_case
from tests.problems.gqa import KINDS as GQA_KINDS
from tests.problems.gqa import GqaCase, gqa_case
from tests.problems.gqa_cases import CASES as GQA_CASES
from tests.problems.gqa_cases import XQA_CASES
from tests.problems.masks import MASKS
from tests.problems.mla import KINDS
from tests.problems.mla_cases import BATCH_CASES, XQA_MLA_CASES
from tests.problems.mla_cases import CASES as MLA_CASES
from tests.problems.problem import E4M3

Case = TypeVar("Case")


def sample_of(cases: Sequence[Case]) -> list[Case]:
    """Return all cases for a GPU; the CPU, whose loops have no tiles, needs a fourth of them."""
    share = 1 if torch.cuda.is_available() else 4
    return random.Random(0).sample(cases, len(cases) // share)  # noqa: S311 - no secret


# Ranks of decode context parallel: with fewer tokens than they may attend to, with more, with none.
RANKS: list[dict[str, Any]] = [
    {"cp_world": world, "cp_rank": rank, "committed": committed, **facts}
    for world, rank, committed, facts in (
        (2, 1, (137, 0), {"q_len": 4}),
        (3, 0, (208, 2), {"q_len": 3, "layout": "HND"}),
        (8, 7, (559, 5), {"q_len": 5, "page_size": 64}),
        (8, 3, (559, 20), {}),
        (1, 0, (68, -1), {"q_len": 2}),
        (4, 2, (277, 11), {"q_lens": (3, 2), "kv": "e4m3", "page_size": 64}),
        (3, 2, (8990, 0, 1), {"q_len": 3, "seq_lens": (3000, 0, 70), "head_dim": 64}),
        (2, 0, (150, 2**31 - 1), {"q_len": 2, "kv": "nvfp4", "head_dim": 64}),
        (2**31 - 1, 2**31 - 2, (2**31 - 3, 0), {"q_len": 3}),
    )
]
SERVER_FACTS: tuple[dict[str, Any], ...] = (
    *({"q_len": 3, "mask": "random"}, {"q_lens": (3, 2), "mask": "random"}),
    *({"q_lens": (1, 0), "window": 20}, {"cache_layout": "stacked", "layout": "HND"}),
    {"kv": "e4m3", "out_dtype": E4M3, "output_scale": 0.5},
    {"kv": "nvfp4", "o_scale": 0.5, "layout": "HND"},
    *RANKS,
    {"has_value_tables": True, "q_len": 3},
    {"has_value_tables": True, "kv": "e4m3", "page_size": 64, "seq_lens": (3000, 0, 70)},
    {"has_value_tables": True, "kv": "nvfp4", "head_dim": 64, "q_lens": (3, 2)},
)
_SHORT: dict[str, Any] = {"seq_lens": (70, 3), "sink": 3.0}
SERVER_CASES = [GqaCase(**_SHORT | facts) for facts in SERVER_FACTS]
PLANNED_GQA_CASES = [
    *(
        gqa_case(kind, seq_lens=lens, head_dim=64, kv_heads=1, sink=3.0)
        for kind in GQA_KINDS
        for lens in ((70, 3, 0), (5000, 3))
    ),
    *(
        GqaCase(seq_lens=(70, 3, 33), sink=3.0, **facts)
        for facts in (
            *({"window": 20}, {"q_len": 3, "window": 20}, {"q_len": 3, "causal": False}),
            *({"layout": "HND", "page_size": 64}, {"cache_layout": "stacked", "layout": "HND"}),
            *({"page_size": 1}, {"soft_cap": 20.0, "score_scale": 1.0}),
        )
    ),
]
# Cases of each entry point, and its call.
CALLS: dict[str, tuple[Sequence[Any], Callable[[Any], tuple[torch.Tensor, ...]]]] = {
    "MLA": (sample_of(MLA_CASES), compute),  # through an entry point that has the arguments
    "BatchMLA": (sample_of(BATCH_CASES), lambda given: run_with_lse(wrapper_of(given), given)),
    "GQA": (sample_of(GQA_CASES), decode_gqa_with_lse),
    "trtllm_gqa": (SERVER_CASES, trtllm_gqa_with_lse),
    "batch decode": (PLANNED_GQA_CASES, decode_planned),
    "xqa": (sample_of(XQA_CASES), run_xqa_with_lse),
    "xqa_mla": (XQA_MLA_CASES, lambda given: (ENTRY_POINTS["xqa_mla"].run(given),)),
}
RESULTS = [
    pytest.param(call, case, id=f"{name}: {case}")
    for name, (cases, call) in CALLS.items()
    for case in cases
]


class TestFloat64:
    """Results of problems, on the device of the fixture."""

    @pytest.mark.parametrize(("call", "case"), RESULTS)
    def test_results(self, call: Any, case: Any, device: str) -> None:
        """The output is right, and the LSE of the entry points that have one."""
        problem = case.build(device)

        problem.check(*call(problem))

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("mask", MASKS)
    def test_masks(self, mask: str, form: str, device: str) -> None:
        """Each token attends to what its mask allows, and the output of padding is zeros."""
        facts, changes = FORMS[form]
        problem = flare_case(mask=mask, **facts).build(device)

        problem.check(decode(problem, **changes))

    @pytest.mark.parametrize("form", ["ragged", "padded", "dense", "dense, padded"])
    @pytest.mark.parametrize("mask", ["causal", "window of 3", "either of two"])
    @pytest.mark.parametrize("kind", ["fp16", "e4m3", "fp8_per_token"])
    def test_formats(self, kind: str, mask: str, form: str, device: str) -> None:
        """Every KV format of flare decodes, with poison between the rows."""
        facts, changes = FORMS[form]
        given: dict[str, Any] = KINDS[kind] | facts
        problem = flare_case(mask=mask, **given).build(device)

        problem.check(decode(problem, **changes))
