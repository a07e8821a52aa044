"""The doors of flashinfer.xqa on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

import mlagen.xqa
from tests.cases import MlaCase
from tests.gqa_problems import GqaCase
from tests.xqa_cases import MLA_CASES, XQA_CASES
from tests.xqa_semantics import (
    XqaSemantics,
    run_xqa,
    run_xqa_mla,
    xqa_arguments,
    xqa_mla_arguments,
)


@pytest.mark.parametrize("case", XQA_CASES, ids=str)
def test_every_element_is_attention_as_float64_computes_it(case: GqaCase) -> None:
    """The output is right, whatever NaN and wild ids stand in what must not be read."""
    problem = case.build("cuda")

    out = run_xqa(problem)

    problem.check(out)


@pytest.mark.parametrize("case", MLA_CASES, ids=str)
def test_every_element_of_mla_is_attention_as_float64_computes_it(case: MlaCase) -> None:
    """The output is right, values in the cache of the keys or in one of their own."""
    problem = case.build("cuda")

    out = run_xqa_mla(problem)

    problem.check(out)


class TestOnTheGpu(XqaSemantics):
    """Every promise of the doors, kept by the kernels."""

    device = "cuda"


def test_a_graph_of_xqa_follows_changed_lengths() -> None:
    """What is captured once is right for the lengths of a replay."""
    problem = GqaCase(name="", seq_lens=(5000, 70)).build("cuda")
    shorter = GqaCase(name="", seq_lens=(5000, 70)).build("cuda")
    arguments = xqa_arguments(problem)
    arguments["seq_lens"] = lengths = arguments["seq_lens"].clone()
    mlagen.xqa.xqa(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mlagen.xqa.xqa(**arguments)
    lengths[:, 0] = torch.tensor([33, 0], dtype=torch.int32)
    arguments["workspace_buffer"].fill_(0xFF)

    graph.replay()

    expected = run_xqa(shorter, seq_lens=lengths.clone())
    assert torch.equal(arguments["output"], expected)
    assert (arguments["output"][1] == 0).all()


def test_a_graph_of_xqa_mla_follows_changed_lengths() -> None:
    """What is captured once is right for the lengths of a replay."""
    problem = MlaCase(name="", seq_lens=(5000, 70), scores_take_bmm2=True).build("cuda")
    arguments = xqa_mla_arguments(problem)
    arguments["seq_lens"] = lengths = arguments["seq_lens"].clone()
    mlagen.xqa.xqa_mla(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mlagen.xqa.xqa_mla(**arguments)
    lengths[:, 0] = torch.tensor([33, 0], dtype=torch.int32)

    graph.replay()

    expected = run_xqa_mla(problem, seq_lens=lengths.clone())
    assert torch.equal(arguments["output"], expected)
    assert (arguments["output"][1] == 0).all()
