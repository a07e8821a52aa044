"""Case selection from options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import mlagen
from cache_tools.benchmark.selection import case_of, select_cases


def test_without_options_the_suites_are_measured() -> None:
    """The full suite holds the quick one, of both families, and no case twice."""
    quick, full = select_cases(), [case.label for case in select_cases(suite="full")]

    for family in ("mla", "gqa"):
        assert select_cases([family]) == [each for each in quick if each.family == family]
        assert case_of(family) in quick
    assert len(set(full)) == len(full)
    assert set(full) > {case.label for case in quick}


def test_options_select_a_family_and_its_defaults() -> None:
    """The product of all values, once each; MLA is assumed, and the cache has the query's dtype."""
    mla, gqa = select_cases(["mla", "gqa"], {"heads": [32], "kv_heads": [4], "head_dim": [64]})
    product = select_cases(["mla"], {"batch": [1, 2, 1], "kv_dtype": ["bf16", "e4m3"]})

    pairs = [(case.batch, case.kv_dtype.value) for case in product]
    assert pairs == [(1, "bf16"), (1, "e4m3"), (2, "bf16"), (2, "e4m3")]
    assert mla == case_of("mla", heads=32)
    assert (gqa.heads, gqa.kv_heads, gqa.head_dim_qk, gqa.head_dim_vo) == (32, 4, 64, 64)
    assert select_cases(None, {"batch": [7]}) == [case_of("mla", batch=7)]
    assert select_cases(is_ragged=True) == [case_of("mla", is_ragged=True)]
    dtypes = ["fp16", "e4m3"]
    assert [case.kv_dtype.value for case in select_cases(None, {"dtype": dtypes})] == dtypes


OF_MLA = "no MLA decode kernel for query bf16, cache"


@pytest.mark.parametrize(
    ("families", "axes", "message"),
    [
        (["mha"], {}, "family: expected mla or gqa, got mha"),
        (["mla"], {"kv_heads": [8]}, "kv_heads: expected family gqa with it, got family mla"),
        (None, {"head_dim": [64]}, "head_dim: expected family gqa with it, got family mla"),
        (["gqa"], {"top_k": [64]}, "top_k: expected family mla with it, got family gqa"),
        (None, {"top_k": [64], "seq_len": [63]}, "top_k: expected at most 63 (seq_len) and equal "),
        (["gqa"], {"heads": [20]}, "heads: expected a multiple of 8 (kv_heads), got 20"),
        (None, {"seq_len": [2], "q_len": [4]}, "seq_len: expected 4 (q_len) or more, got 2"),
        (None, {"dtype": ["fp32"]}, "dtype: expected one of bf16, fp16, e4m3, got fp32"),
        (None, {"kv_dtype": ["fp32"]}, "kv_dtype: expected one of bf16, fp16, e4m3, fp8_ds_mla, "),
        (["mla"], {"kv_dtype": ["fp16"]}, f"{OF_MLA} fp16; "),
        (["mla"], {"kv_dtype": ["int8"]}, f"{OF_MLA} int8; "),
        (["gqa"], {"dtype": ["e4m3"]}, "no GQA decode kernel for query e4m3, cache e4m3, "),
        (["gqa"], {"head_dim": [320]}, "no GQA decode kernel for head_dim 320; "),
    ],
)
def test_inconsistent_and_unsupported_values_are_rejected(
    families: list[str] | None, axes: Mapping[str, Sequence[Any]], message: str
) -> None:
    """The message has the option, the rule and the value, or that of a call."""
    error = mlagen.UnsupportedError if message.startswith("no ") else mlagen.ArgumentError

    with pytest.raises(error, match=f"^{re.escape(message)}"):
        select_cases(families, axes)
