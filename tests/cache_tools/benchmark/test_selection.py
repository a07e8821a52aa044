"""Case selection from options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import mlagen
from cache_tools.benchmark.selection import case_of, select_cases
from mlagen.spec.dtype import DType


@pytest.mark.parametrize("family", ["mla", "gqa"])
def test_the_default_cases_are_those_of_the_family(family: str) -> None:
    """Without case options, the default cases are measured; `snapshots/bench.txt` has them."""
    assert select_cases([family]) == [each for each in select_cases() if each.family == family]
    assert case_of(family) in select_cases([family])


def test_a_suite_has_each_case_once() -> None:
    """The full suite holds the quick one, and no two of its cases have the same label."""
    labels = [case.label for case in select_cases(suite="full")]

    assert len(set(labels)) == len(labels)
    assert set(labels) > {case.label for case in select_cases(suite="quick")}


def test_values_give_every_combination() -> None:
    """The cases are the product of all values, in order, without duplicates."""
    cases = select_cases(["mla"], {"batch": [1, 2, 1], "kv_dtype": ["bf16", "e4m3"]})

    assert [(case.batch, case.kv_dtype) for case in cases] == [
        (1, DType.BF16),
        (1, DType.E4M3),
        (2, DType.BF16),
        (2, DType.E4M3),
    ]


def test_each_family_takes_its_own_parameters() -> None:
    """Parameters of GQA alone change no MLA case."""
    mla, gqa = select_cases(["mla", "gqa"], {"heads": [32], "kv_heads": [4], "head_dim": [64]})

    assert mla == case_of("mla", heads=32)
    assert (gqa.heads, gqa.kv_heads, gqa.head_dim_qk, gqa.head_dim_vo) == (32, 4, 64, 64)


def test_a_case_of_no_family_is_mla() -> None:
    """A single option, --ragged included, selects MLA."""
    assert select_cases(None, {"batch": [7]}) == [case_of("mla", batch=7)]
    assert select_cases(is_ragged=True) == [case_of("mla", is_ragged=True)]


def test_the_default_dtype_of_the_cache_is_that_of_the_query() -> None:
    """kv_dtype overrides it."""
    assert [case.kv_dtype for case in select_cases(None, {"dtype": ["fp16", "e4m3"]})] == [
        DType.FP16,
        DType.E4M3,
    ]


@pytest.mark.parametrize(
    ("families", "axes", "message"),
    [
        (["mha"], {}, "family: expected mla or gqa, got mha"),
        (["mla"], {"kv_heads": [8]}, "kv_heads: expected family gqa with it, got family mla"),
        (None, {"head_dim": [64]}, "head_dim: expected family gqa with it, got family mla"),
        (["gqa"], {"top_k": [64]}, "top_k: expected family mla with it, got family gqa"),
        (
            None,
            {"top_k": [64], "seq_len": [63]},
            "top_k: expected at most 63 (seq_len) and equal lengths, got 64",
        ),
        (["gqa"], {"heads": [20]}, "heads: expected a multiple of 8 (kv_heads), got 20"),
        (None, {"seq_len": [2], "q_len": [4]}, "seq_len: expected 4 (q_len) or more, got 2"),
        (None, {"dtype": ["fp32"]}, "dtype: expected one of bf16, fp16, e4m3, got fp32"),
        (
            None,
            {"kv_dtype": ["fp32"]},
            "kv_dtype: expected one of bf16, fp16, e4m3, fp8_ds_mla, int8, nvfp4, got fp32",
        ),
    ],
)
def test_inconsistent_values_are_rejected(
    families: list[str] | None, axes: Mapping[str, Sequence[Any]], message: str
) -> None:
    """The message has the option, the rule and the value."""
    with pytest.raises(mlagen.ArgumentError) as caught:
        select_cases(families, axes)

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("family", "axes", "message"),
    [
        ("mla", {"kv_dtype": ["fp16"]}, "no MLA decode kernel for query bf16, cache fp16; "),
        ("mla", {"kv_dtype": ["int8"]}, "no MLA decode kernel for query bf16, cache int8; "),
        ("gqa", {"dtype": ["e4m3"]}, "no GQA decode kernel for query e4m3, cache e4m3, "),
        ("gqa", {"head_dim": [320]}, "no GQA decode kernel for head_dim 320; "),
    ],
)
def test_an_unsupported_case_is_rejected(
    family: str, axes: Mapping[str, Sequence[Any]], message: str
) -> None:
    """The message is that of a call, with the supported values."""
    with pytest.raises(mlagen.UnsupportedError) as caught:
        select_cases([family], axes)

    assert str(caught.value).startswith(message)
