"""Tests of the FP8-KV sm90 MLA specs: covered calls and tile selection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlagen.spec.arch import ARCHS
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import CallShape
from mlagen.spec.mla.sm90_fp8kv import mla_sm90_fp8kv_spec, mla_sm90_fp8kv_specs
from mlagen.spec.mla.variant import PAGE_SIZES, MlaVariant
from tests.kernels import SM_90A, mla_sm90, mla_sm90_fp8kv

PACKED = MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.FP8_DS_MLA)

COVERED: dict[str, dict[str, Any]] = {
    "656-byte rows": {},
    "sparse": {"lookup": "sparse"},
    "plain e4m3": {"kv_dtype": DType.E4M3},
    "plain e4m3 in lists": {"kv_dtype": DType.E4M3, "lookup": "sparse"},
    "pages of any size": {"page_size": 3},
    "e4m3 under e4m3": {"query_dtype": DType.E4M3, "kv_dtype": DType.E4M3},
    "640-byte rows": {"query_dtype": DType.FP8_PER_TOKEN, "kv_dtype": DType.FP8_PER_TOKEN},
}
NOT_COVERED: dict[str, dict[str, Any]] = {
    "656-byte rows under e4m3": {"query_dtype": DType.E4M3},
    "16 bits": {"kv_dtype": DType.BF16},
    "fp16": {"query_dtype": DType.FP16},
    "another rank": {"kv_dtype": DType.E4M3, "kv_lora_rank": 256},
    "no rope": {"kv_dtype": DType.E4M3, "qk_rope_head_dim": 0},
    "separate values": {"kv_dtype": DType.E4M3, "values": "separate"},
}


@pytest.mark.parametrize("changes", COVERED.values(), ids=COVERED)
def test_an_fp8_kv_cache_has_an_fp8kv_kernel(changes: dict[str, Any]) -> None:
    """Dense calls with pages of any size and sparse calls are covered."""
    assert mla_sm90_fp8kv_spec(SM_90A, replace(PACKED, **changes), 16) is not None


@pytest.mark.parametrize("changes", NOT_COVERED.values(), ids=NOT_COVERED)
def test_an_unsupported_call_has_no_fp8kv_kernel(changes: dict[str, Any]) -> None:
    """The spec of an unsupported call is None."""
    assert mla_sm90_fp8kv_spec(SM_90A, replace(PACKED, **changes), 16) is None


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_only_sm_90a_has_fp8kv_kernels(arch: Any) -> None:
    """Three dtype pairs have two modes, fp8_per_token has one; three tiles each, listed once."""
    specs = list(mla_sm90_fp8kv_specs(arch))

    assert len(specs) == len(set(specs))
    assert len(specs) == ((3 * 2 + 1) * 3 * len(PAGE_SIZES) if arch == SM_90A else 0)


def test_a_sparse_query_token_is_a_sequence() -> None:
    """The rows of a sparse call are its heads."""
    call = CallShape(heads=16, q_len=4)

    assert mla_sm90_fp8kv(rows=16).serves(call)
    assert mla_sm90_fp8kv(rows=64, lookup="paged").serves(call)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_a_cta_occupies_an_sm(rows: int) -> None:
    """A CTA has eight PV warps, four QK warps and four producer warps."""
    spec = mla_sm90_fp8kv(rows=rows)

    assert spec.threads == 512
    assert spec.shared_bytes == mla_sm90(rows=rows).shared_bytes
