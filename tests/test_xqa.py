"""Entry points of flashinfer.xqa on the CPU: the torch backend against float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest

import mlagen.xqa
from tests.cases import MlaCase
from tests.gqa_problems import E4M3, GqaCase
from tests.xqa_cases import MLA_CASES, XQA_CASES
from tests.xqa_semantics import XqaSemantics, run_xqa, run_xqa_mla, xqa_mla_arguments


@pytest.mark.parametrize("case", XQA_CASES, ids=str)
def test_every_element_is_attention_as_float64_computes_it(case: GqaCase) -> None:
    """NaN slots and invalid page ids outside of the KV range do not affect the output."""
    problem = case.build("cpu")

    out = run_xqa(problem)

    problem.check(out)


@pytest.mark.parametrize("case", MLA_CASES, ids=str)
def test_every_element_of_mla_is_attention_as_float64_computes_it(case: MlaCase) -> None:
    """The output is right with values in the key cache or in a separate one."""
    problem = case.build("cpu")

    out = run_xqa_mla(problem)

    problem.check(out)


class TestOnTheCpu(XqaSemantics):
    """Semantics of the entry points, without a GPU."""

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


@pytest.mark.parametrize("entry_point", SIGNATURES, ids=lambda function: function.__name__)
def test_the_signature_is_the_one_of_flashinfer(entry_point: Callable[..., None]) -> None:
    """Names, order and defaults of the parameters equal FlashInfer's."""
    parameters = inspect.signature(entry_point).parameters.values()

    def shown(*kinds: object) -> str:
        of_kind = [p for p in parameters if p.kind in kinds]
        return " ".join(
            p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in of_kind
        )

    kinds = inspect.Parameter
    positional, keyword = SIGNATURES[entry_point]
    assert shown(kinds.POSITIONAL_OR_KEYWORD) == positional
    assert shown(kinds.KEYWORD_ONLY) == keyword


SHARED = MlaCase(name="", dtype=E4M3, seq_lens=(70, 3), cache_layout="[P,ps,1,d]")
APART = replace(SHARED, values="other cache")


@pytest.mark.parametrize("case", [SHARED, APART], ids=["shared", "apart"])
def test_strides_of_axes_of_size_1_do_not_count(case: MlaCase) -> None:
    """Strides of axes of size 1 are ignored."""
    problem = case.build("cpu")
    arguments = xqa_mla_arguments(problem)
    values = arguments["v_cache"]
    pages, tokens, width = values.squeeze(2).stride()
    arguments["v_cache"] = values.as_strided(values.shape, (pages, tokens, 9, width))

    mlagen.xqa.xqa_mla(**arguments)

    problem.check(arguments["output"])
