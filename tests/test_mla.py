"""MLA decode on the CPU: the torch backend against float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mlagen
from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.dispatch import MLA
from tests.cases import MlaCase
from tests.mla_cases import CASES
from tests.mla_semantics import MlaSemantics, compute, decode, decode_with_lse
from tests.mla_variant_semantics import MlaVariantSemantics

# Cases that take gigabytes in float64 run on the GPU only.
SHORT = [case for case in CASES if max(case.seq_lens) <= 10_000]


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_every_element_is_attention_as_float64_computes_it(case: MlaCase) -> None:
    """NaN slots and invalid page ids outside of the KV range do not affect output and LSE."""
    problem = case.build("cpu")

    out, lse = compute(problem)

    problem.check(out, lse)


class TestOnTheCpu(MlaSemantics):
    """Semantics of the entry point, without a GPU."""

    device = "cpu"


class TestVariantsOnTheCpu(MlaVariantSemantics):
    """Semantics of sparse, biased, FP8-KV and other calls."""

    device = "cpu"


def test_the_oracle_sees_a_wrong_element() -> None:
    """The check detects one wrong element among thousands, and reports its index."""
    problem = MlaCase(name="", seq_lens=(70, 3)).build("cpu")
    out = decode(problem)
    out[1, 0, 7, 300] += 0.1

    with pytest.raises(
        AssertionError, match=r"out: 1 of 16384 elements off; first at \(1, 7, 300\)"
    ):
        problem.check(out)


def test_the_oracle_sees_a_token_too_many() -> None:
    """The check detects a mask that is one token too wide."""
    problem = MlaCase(name="", seq_lens=(5, 3), q_len=2).build("cpu")
    shifted = problem.seq_lens + 1

    out = decode(problem, seq_lens=shifted, kv_cache=problem.kv_cache.nan_to_num(0.0))

    with pytest.raises(AssertionError, match="elements off"):
        problem.check(out)


def test_the_signature_is_the_one_of_flashinfer() -> None:
    """Names, order and defaults of the parameters equal FlashInfer's."""
    parameters = inspect.signature(mlagen.mla.trtllm_batch_decode_with_kv_cache_mla).parameters

    assert _shown(mlagen.mla.trtllm_batch_decode_with_kv_cache_mla) == (
        "query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim "
        "block_tables seq_lens max_seq_len sparse_mla_top_k=0 out=None bmm1_scale=1.0 "
        "bmm2_scale=1.0 sinks=None skip_softmax_threshold_scale_factor=None enable_pdl=None "
        "backend='auto' is_var_seq=True uses_shared_paged_kv_idx=True lse=None return_lse=False "
        "cute_dsl_impl='auto' kv_scale_format='auto' cum_seq_lens_q=None max_q_len=None "
        "multi_ctas_kv_counter_buffer=None sparse_mla_top_k_lens=None enable_dcp=False cp_world=1 "
        "cp_rank=0 causal_seqlens_kv_global=None use_fp16_softmax=None return_lse_base='base2'"
    )
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_the_signature_of_xqa_is_the_one_of_flashinfer() -> None:
    """Names, order and defaults of the parameters equal FlashInfer's."""
    shown = _shown(mlagen.mla.xqa_batch_decode_with_kv_cache_mla)

    assert shown == (
        "query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim "
        "block_tables seq_lens max_seq_len out=None bmm1_scale=1.0 bmm2_scale=1.0 sinks=None "
        "enable_pdl=None"
    )


def _shown(function: Callable[..., object]) -> str:
    parameters = inspect.signature(function).parameters.items()
    return " ".join(n if p.default is p.empty else f"{n}={p.default!r}" for n, p in parameters)


NEWER = (None, True, "xqa")  # skip_softmax_threshold_scale_factor, enable_pdl, backend
OLDER = (True, "xqa")  # enable_pdl, backend
ORDERS = {
    "the newer order": NEWER,
    "the newer order, cut short": (0.0, False),
    "the older order": OLDER,
    "the older order without a choice of PDL": (None, "trtllm-gen"),
    "the older order, cut short": (False,),
}


@pytest.mark.parametrize("tail", ORDERS.values(), ids=ORDERS)
def test_both_positional_orders_mean_the_same(
    tail: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `sinks`, either positional order of FlashInfer passes enable_pdl to the kernel."""
    problem = MlaCase(name="", seq_lens=(70, 3), with_sinks=True).build("cpu")
    given = problem.arguments()
    leading = [
        given[name]
        for name in (
            "query",
            "kv_cache",
            "workspace_buffer",
            "qk_nope_head_dim",
            "kv_lora_rank",
            "qk_rope_head_dim",
            "block_tables",
            "seq_lens",
            "max_seq_len",
        )
    ]
    seen = []

    run = MLA.run

    def record(inputs: MlaArgs, enable_pdl: bool, *rest: Any) -> tuple[torch.Tensor, ...]:
        seen.append(enable_pdl)
        return run(inputs, enable_pdl, *rest)

    monkeypatch.setattr(MLA, "run", record)
    entry_point: Any = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla

    out = entry_point(
        *leading, 0, None, given["bmm1_scale"], given["bmm2_scale"], given["sinks"], *tail
    )

    problem.check(out)
    assert seen == [False not in tail]


@pytest.mark.parametrize("backend", ["auto", "xqa", "trtllm-gen", "cute-dsl"])
def test_every_backend_name_has_the_same_semantics(backend: str) -> None:
    """Scales, LSE and output do not depend on the backend name."""
    case = MlaCase(name="", seq_lens=(70, 3), score_scale=0.05, output_scale=2.0)
    problem = case.build("cpu")

    out, lse = decode_with_lse(problem, backend=backend)

    problem.check(out, lse)


def test_int_scales_are_numbers() -> None:
    """A scale of 1 equals a scale of 1.0."""
    case = MlaCase(name="", seq_lens=(70, 3), score_scale=1.0, output_scale=1.0)
    problem = case.build("cpu")

    out = decode(problem, bmm1_scale=1, bmm2_scale=1)

    problem.check(out)
    assert out.dtype is torch.bfloat16


# Each unsupported keyword, with a value that requests it, and its text in the message.
UNSUPPORTED: dict[str, tuple[object, str]] = {
    "enable_dcp": (True, "expected False, got True"),
    "cp_world": (2, "expected 1, got 2"),
    "cp_rank": (1, "expected 0, got 1"),
    "causal_seqlens_kv_global": (torch.zeros(2), "expected None, got a tensor"),
}


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_a_keyword_that_is_not_implemented_is_rejected(keyword: str) -> None:
    """The message has the keyword, the accepted value and the given one; nothing is written."""
    problem = MlaCase(name="", seq_lens=(70, 3)).build("cpu")
    out = torch.full((2, 1, 16, 512), 7.0, dtype=torch.bfloat16)
    value, shown = UNSUPPORTED[keyword]

    with pytest.raises(UnsupportedError) as caught:
        decode(problem, out=out, **{keyword: value})

    assert str(caught.value) == f"{keyword}: not implemented, {shown}"
    assert (out == 7.0).all()


def test_the_unsupported_keyword_is_named() -> None:
    """An earlier keyword with a neutral value is not reported."""
    problem = MlaCase(name="", seq_lens=(70, 3)).build("cpu")

    with pytest.raises(UnsupportedError) as caught:
        decode(problem, skip_softmax_threshold_scale_factor=0.0, enable_dcp=True)

    assert str(caught.value) == "enable_dcp: not implemented, expected False, got True"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"skip_softmax_threshold_scale_factor": torch.ones(2)},
            "skip_softmax_threshold_scale_factor: expected a float, got a tensor",
        ),
        (
            {"skip_softmax_threshold_scale_factor": True, "enable_pdl": True},
            "skip_softmax_threshold_scale_factor: expected a float, got True",
        ),
        (
            {"skip_softmax_threshold_scale_factor": 1.0, "enable_pdl": "xqa"},
            "enable_pdl: expected a bool, got 1.0",
        ),
    ],
    ids=["a tensor", "a bool", "no bool in the older order"],
)
def test_a_keyword_of_another_type_is_rejected(changes: dict[str, Any], message: str) -> None:
    """The type is checked before the value, in either order."""
    problem = MlaCase(name="", seq_lens=(70, 3)).build("cpu")

    with pytest.raises(ArgumentError) as caught:
        decode(problem, **changes)

    assert str(caught.value) == message


def test_neutral_keywords_are_accepted() -> None:
    """Explicit neutral values and hints do not change the result."""
    problem = MlaCase(name="", seq_lens=(70, 3)).build("cpu")

    out = decode(
        problem,
        sparse_mla_top_k=0,
        sparse_mla_top_k_lens=None,
        skip_softmax_threshold_scale_factor=0.0,
        enable_pdl=False,
        is_var_seq=False,
        uses_shared_paged_kv_idx=True,
        cute_dsl_impl="auto",
        kv_scale_format="auto",
        enable_dcp=False,
        use_fp16_softmax=False,
    )

    problem.check(out)


@pytest.mark.parametrize("backend", ["fa2", "", None])
def test_an_unknown_backend_is_rejected(backend: str | None) -> None:
    """The message lists the known names."""
    problem = MlaCase(name="", seq_lens=(70, 3)).build("cpu")

    with pytest.raises(ArgumentError) as caught:
        decode(problem, backend=backend)

    assert str(caught.value) == (
        f"backend: expected one of auto, xqa, trtllm-gen, cute-dsl, sparse, got {backend!r}"
    )
