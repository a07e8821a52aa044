"""GQA decode on the CPU: the torch backend against float64."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import mlagen.decode
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.dispatch import GQA
from tests.gqa_cases import CASES
from tests.gqa_problems import GqaCase
from tests.gqa_semantics import GqaSemantics, decode
from tests.gqa_visibility import GqaVisibility

# Cases that take long in float64 run on the GPU only.
SHORT = [case for case in CASES if max(case.seq_lens) <= 10_000]


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_every_element_is_attention_as_float64_computes_it(case: GqaCase) -> None:
    """NaN slots and invalid page ids outside of the KV range do not affect the output."""
    problem = case.build("cpu")

    out = decode(problem)

    problem.check(out)


class TestOnTheCpu(GqaSemantics, GqaVisibility):
    """Semantics of the entry point, without a GPU."""

    device = "cpu"


def test_the_oracle_sees_a_wrong_element() -> None:
    """The check detects one wrong element among thousands, and reports its index."""
    problem = GqaCase(name="", seq_lens=(70, 3)).build("cpu")
    out = decode(problem)
    out[1, 7, 100] += 0.1

    with pytest.raises(
        AssertionError, match=r"out: 1 of 2048 elements off; first at \(1, 7, 100\)"
    ):
        problem.check(out)


@pytest.mark.parametrize(
    "change",
    [{"window_left": 30}, {"q_len": 1}, {"mask": None}],
    ids=["a window wider by one", "a token too many", "another mask"],
)
def test_the_oracle_sees_a_token_too_many(change: dict[str, object]) -> None:
    """The check detects a row that attends to one token too many."""
    case = GqaCase(name="", seq_lens=(50, 33), q_len=2, window=30, mask="random", seed=3)
    problem = case.build("cpu")
    assert problem.bits is not None
    problem.bits[:] = torch.eye(2).repeat(2, 16).bool()  # each draft attends to itself
    if "q_len" in change:  # the other token of the first request
        problem.bits[0, 1] = True
        out = decode(problem)
        problem.bits[0, 1] = False
    else:
        out = decode(problem, **change)

    with pytest.raises(AssertionError, match="elements off"):
        problem.check(out)


def test_the_signature_is_the_one_of_flashinfer() -> None:
    """Names, order and defaults of the parameters equal FlashInfer's."""
    parameters = inspect.signature(mlagen.decode.xqa_batch_decode_with_kv_cache).parameters

    shown = [
        name if p.default is p.empty else f"{name}={p.default!r}" for name, p in parameters.items()
    ]

    assert " ".join(shown) == (
        "query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale=1.0 "
        "bmm2_scale=1.0 window_left=-1 out=None sinks=None kv_layout='NHD' enable_pdl=None "
        "q_len_per_req=1 o_scale=1.0 mask=None kv_cache_sf=None q_cu_seq_lens=None"
    )
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


@pytest.mark.parametrize(
    ("given", "passed"),
    [(None, True), (True, True), (False, False), (1, True), (0, False), (np.bool_(0), False)],
)
def test_pdl_is_used_unless_disabled(
    given: object, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None means True, and the ints 0 and 1 are accepted as bools."""
    seen = []

    run = GQA.run

    def record(inputs: GqaArgs, enable_pdl: bool, *rest: Any) -> tuple[torch.Tensor, ...]:
        seen.append(enable_pdl)
        return run(inputs, enable_pdl, *rest)

    monkeypatch.setattr(GQA, "run", record)

    decode(GqaCase(name="", seq_lens=(70, 3)).build("cpu"), enable_pdl=given)

    assert seen == [passed]
