"""The doors of flashinfer.xqa on the CPU: the backend in plain torch, against float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

import mlagen.xqa
from tests.cases import MlaCase
from tests.gqa_problems import GqaCase
from tests.xqa_cases import MLA_CASES, XQA_CASES
from tests.xqa_semantics import XqaSemantics, run_xqa, run_xqa_mla


@pytest.mark.parametrize("case", XQA_CASES, ids=str)
def test_every_element_is_attention_as_float64_computes_it(case: GqaCase) -> None:
    """The output is right, whatever NaN and wild ids stand in what must not be read."""
    problem = case.build("cpu")

    out = run_xqa(problem)

    problem.check(out)


@pytest.mark.parametrize("case", MLA_CASES, ids=str)
def test_every_element_of_mla_is_attention_as_float64_computes_it(case: MlaCase) -> None:
    """The output is right, values in the cache of the keys or in one of their own."""
    problem = case.build("cpu")

    out = run_xqa_mla(problem)

    problem.check(out)


class TestOnTheCpu(XqaSemantics):
    """Every promise of the doors, without a GPU."""

    device = "cpu"


_XQA = (
    "q k_cache v_cache page_table seq_lens output workspace_buffer semaphores num_kv_heads "
    "page_size sinks=None q_scale=1.0 kv_scale=1.0 sliding_win_size=0 kv_layout='NHD' "
    "sm_count=None enable_pdl=None rcp_out_scale=1.0 q_seq_len=1 mask=None"
)
_XQA_MLA = (
    "q k_cache v_cache page_table seq_lens output workspace_buffer semaphores page_size "
    "q_scale=1.0 kv_scale=1.0 sm_count=None enable_pdl=None"
)
# By position, and by keyword only.
SIGNATURES = {
    mlagen.xqa.xqa: (_XQA, "q_cu_seq_lens=None k_sf_cache=None v_sf_cache=None"),
    mlagen.xqa.xqa_mla: (_XQA_MLA, ""),
}


@pytest.mark.parametrize("door", SIGNATURES, ids=lambda door: door.__name__)
def test_the_signature_is_the_one_of_flashinfer(door: Callable[..., None]) -> None:
    """Names, order and defaults of the parameters are those that callers rely on."""
    parameters = inspect.signature(door).parameters.values()

    def shown(*kinds: object) -> str:
        of_kind = [p for p in parameters if p.kind in kinds]
        return " ".join(
            p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in of_kind
        )

    kinds = inspect.Parameter
    positional, keyword = SIGNATURES[door]
    assert shown(kinds.POSITIONAL_OR_KEYWORD) == positional
    assert shown(kinds.KEYWORD_ONLY) == keyword
