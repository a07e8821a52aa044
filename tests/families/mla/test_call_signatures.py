"""Kernel parameters of MLA calls with rare arguments; needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.families.launches import Launch, launched
from tests.families.mla.conftest import E4M3, RAGGED, UNIFORM
from tests.problems.mla import MlaCase

# Cases with the parameters that differ from a plain call, as functions of the arguments.
RARE: dict[str, tuple[MlaCase, dict[str, Any]]] = {
    "parts of query and cache": (
        replace(UNIFORM, separate_rope=True, flat_tables=True, q_len=2, is_causal=False),
        {
            "query_rope": lambda i: i.query_rope.data_ptr(),
            "query_stride": 16 * 512 * 2,
            "query_rope_stride": 16 * 64 * 2,
            "query_rope_head_stride": 64 * 2,
            "rope_cache": lambda i: i.rope_cache.data_ptr(),
            "page_stride": 64 * 512 * 2,
            "rope_page_stride": 65 * 128 * 2,
            "rope_token_stride": 128 * 2,
            "kv_indptr": lambda i: i.kv_indptr.data_ptr(),
            "block_tables_stride": 0,
            "max_pages": 11,
            "is_causal": 0,
            "q_len": 2,
        },
    ),
    "values in other pages": (
        replace(UNIFORM, values="other pages"),
        {
            "value_cache": lambda i: i.kv_cache.data_ptr(),
            "value_tables": lambda i: i.block_tables[:, 1].data_ptr(),
            "block_tables_stride": 10,
            "max_pages": 5,
        },
    ),
    "values in another cache": (
        replace(UNIFORM, values="other cache", bmm2_scales_scores=True),
        {
            "value_cache": lambda i: i.value_cache.data_ptr(),
            "value_tables": lambda i: i.block_tables.data_ptr(),
            "bmm2_scales_scores": 1,
        },
    ),
    "e4m3": (
        replace(UNIFORM, dtype=E4M3),
        {
            "query_rope": lambda i: i.query.data_ptr() + 512,
            "query_stride": 16 * 576,
            "rope_cache": lambda i: i.kv_cache.data_ptr() + 512,
            "token_stride": 576,
        },
    ),
    "e4m3 with scales": (
        replace(UNIFORM, kv_format="e4m3", scales="for 128 elements"),
        {
            "query_rope": lambda i: i.query.data_ptr() + 1024,
            "rope_cache": lambda i: i.kv_cache.data_ptr() + 512,
            "kv_scales": lambda i: i.kv_scales.data_ptr(),
            "scale_page_stride": 256,
            "scale_token_stride": 4,
            "rope_scale": lambda i: i.rope_scale,
            "latent_scale": 1.0,
        },
    ),
    "e4m3 with two scales": (
        replace(UNIFORM, kv_format="e4m3", scales="two"),
        {
            "kv_scales": 0,
            "rope_scale": lambda i: i.rope_scale,
            "latent_scale": lambda i: i.latent_scale,
        },
    ),
    "fp8_ds_mla": (
        replace(UNIFORM, kv_format="fp8_ds_mla"),
        {"rope_cache": lambda i: i.kv_cache.data_ptr(), "token_stride": 656},
    ),
    "fp8_per_token": (
        replace(UNIFORM, dtype=E4M3, kv_format="fp8_per_token"),
        {
            "query_rope": lambda i: i.query.data_ptr() + 512,
            "query_head_stride": 640,
            "query_scales": lambda i: i.query_scales.data_ptr(),
            "kv_scales": lambda i: i.kv_scales.data_ptr(),
            "scale_page_stride": 64,
            "scale_token_stride": 1,
            "token_stride": 640,
        },
    ),
    "a bias for all heads": (
        replace(UNIFORM, bias="one for all heads"),
        {"bias": lambda i: i.bias.data_ptr(), "bias_stride": 75, "bias_head_stride": 0},
    ),
    "a bias for each head": (
        replace(UNIFORM, bias="for each head"),
        {"bias": lambda i: i.bias.data_ptr(), "bias_stride": 16 * 75, "bias_head_stride": 75},
    ),
    "context parallel": (
        replace(UNIFORM, cp_world=4, cp_rank=3),
        {
            "causal_seqlens_kv_global": lambda i: i.causal_seqlens_kv_global.data_ptr(),
            "cp_world": 4,
            "cp_rank": 3,
            "is_causal": 1,
        },
    ),
    "sparse": (
        replace(UNIFORM, top_k=70, with_top_k_lens=True, q_len=2),
        {
            "topk": 70,
            "topk_length": lambda i: i.top_k_lens.data_ptr(),
            "block_tables_stride": 70,
            "num_seqs": 2,
            "q_len": 2,
            "row_tiles": 1,
        },
    ),
    "sparse ragged": (
        replace(RAGGED, top_k=70),
        {"topk": 70, "topk_length": 0, "num_seqs": 2, "q_len": 0},
    ),
}


@pytest.mark.parametrize(("case", "expected"), RARE.values(), ids=RARE)
def test_rare_arguments_set_their_parameters(
    case: MlaCase, expected: dict[str, Any], launches: list[Launch]
) -> None:
    """Each rare argument sets its kernel parameters, and no others."""
    inputs = case.build("cpu").inputs()

    launched(inputs, launches)

    wanted = {name: value(inputs) if callable(value) else value for name, value in expected.items()}
    assert {name: launches[0].values[name] for name in expected} == wanted
