"""The entry points of flashinfer.xqa on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

import mlagen.xqa
from tests.gqa_cases import DTYPES, Dtypes
from tests.graph_replay import captured, cloned, exchange
from tests.problems.entry_points import run_xqa, run_xqa_mla, xqa_arguments, xqa_mla_arguments
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase
from tests.problems.problem import E4M3
from tests.xqa_cases import MLA_CASES, XQA_CASES
from tests.xqa_semantics import XqaSemantics


@pytest.mark.parametrize("case", XQA_CASES, ids=str)
def test_output_matches_float64(case: GqaCase) -> None:
    """The output is right with NaN and invalid page ids in all memory that must not be read."""
    problem = case.build("cuda")

    out = run_xqa(problem)

    problem.check(out)


@pytest.mark.parametrize("case", MLA_CASES, ids=str)
def test_mla_output_matches_float64(case: MlaCase) -> None:
    """The output is right, with values in the cache of the keys or in one of their own."""
    problem = case.build("cuda")

    out = run_xqa_mla(problem)

    problem.check(out)


class TestXqaOnGpu(XqaSemantics):
    """Shared tests, on a GPU."""

    device = "cuda"


# All have as many pages of 16 or 64 tokens, so that the tensors keep their shapes.
_LENGTHS = ((5000, 70, 0), (0, 4999, 66), (66, 0, 4998))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_a_replay_of_xqa_follows_changed_lengths(dtypes: Dtypes) -> None:
    """A replay is right for the current lengths, tables and caches."""
    problems = [
        GqaCase(
            name="",
            seq_lens=lens,
            kv_heads=1,
            dtype=dtypes.dtype,
            kv=dtypes.kv,
            out_dtype=dtypes.out_dtype,
            output_scale=1.0 if dtypes.kv == "16-bit" else 0.5,
            seed=seed,
        ).build("cuda")
        for seed, lens in enumerate(_LENGTHS)
    ]
    static = cloned(xqa_arguments(problems[0]))
    names = ["q", "k_cache", "v_cache", "page_table", "seq_lens"]
    names += ["k_sf_cache", "v_sf_cache"] if dtypes.kv == "nvfp4" else []
    graph = captured(mlagen.xqa.xqa, static)

    for problem in (*problems[1:], problems[0]):
        exchange(static, xqa_arguments(problem), *names)
        graph.replay()

        problem.check(static["output"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("values", ["shared", "other cache"])
def test_a_replay_of_xqa_mla_follows_changed_lengths(values: str, dtype: torch.dtype) -> None:
    """A replay is right for the current lengths, tables and caches."""
    problems = [
        MlaCase(
            name="",
            seq_lens=lens,
            dtype=dtype,
            values=values,
            scores_take_bmm2=True,
            output_scale=0.5,
            seed=seed,
        ).build("cuda")
        for seed, lens in enumerate(_LENGTHS)
    ]
    static = cloned(xqa_mla_arguments(problems[0]))
    if values == "shared":
        static["v_cache"] = static["k_cache"]
    graph = captured(mlagen.xqa.xqa_mla, static)

    for problem in (*problems[1:], problems[0]):
        given = xqa_mla_arguments(problem)
        exchange(static, given, "q", "k_cache", "v_cache", "page_table", "seq_lens")
        graph.replay()

        problem.check(static["output"])
