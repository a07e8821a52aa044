"""Grids of BatchMLA on a GPU: the parameters of FlashInfer's tests and more, as products."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests.problems.batch_mla import batch_case, run_with_lse, wrapper_of
from tests.problems.mla import MlaCase

DEVICE = "cuda"
_PLAIN: dict[str, dict[str, Any]] = {"bf16": {}, "fp16": {"dtype": torch.float16}}
_E4M3: dict[str, dict[str, Any]] = {
    "e4m3": {"kv_format": "e4m3", "scales": "two"},
    "e4m3, scales of tokens": {"kv_format": "e4m3", "scales": "for 128 elements"},
}
_ALL = _PLAIN | _E4M3


def _check(case: MlaCase, what: str = "") -> None:
    """Fail unless output and LSE are right."""
    problem = case.build(DEVICE)
    out, lse = run_with_lse(wrapper_of(problem), problem)
    try:
        problem.check(out, lse)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error


@pytest.mark.parametrize("facts", _ALL.values(), ids=_ALL)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("batch", [1, 3, 5, 7])
def test_pages(batch: int, heads: int, page: int, facts: dict[str, Any]) -> None:
    """FlashInfer's lengths, with few and many query tokens, causal and not."""
    lens = (0, 17, 33, 96, 97, 114, 514, 1024) if batch == 1 else (0, 17, 33, 97, 114)
    for kv_len, q_len, is_causal in product(lens, (1, 7), (True, False)):
        if q_len > 1 and (kv_len > 514 or (heads == 64 and batch > 3)):
            continue  # float64 is slow
        seqs = tuple((q_len, max(0, kv_len - index)) for index in range(batch))
        case = batch_case("", seqs, page_size=page, heads=heads, is_causal=is_causal, **facts)

        _check(case, f"{q_len} over {kv_len}, {'causal' if is_causal else 'all'}")


@pytest.mark.parametrize("facts", _ALL.values(), ids=_ALL)
@pytest.mark.parametrize("q_len", [1, 3, 5, 7, 9, 11, 13, 15, 17])
def test_query_tokens(q_len: int, facts: dict[str, Any]) -> None:
    """Every odd number of query tokens up to 17, over shorter and longer KV lengths."""
    for (page, heads), is_causal in product(((1, 16), (16, 64), (64, 6)), (True, False)):
        seqs = tuple((q_len, kv_len) for kv_len in (0, 1, 3, 11, 17, 33, 79))
        case = batch_case("", seqs, page_size=page, heads=heads, is_causal=is_causal, **facts)

        _check(case, f"page {page}, {heads} heads, {'causal' if is_causal else 'all'}")


@pytest.mark.parametrize("facts", _ALL.values(), ids=_ALL)
@pytest.mark.parametrize("kv_len", [514, 2743, 8736])
@pytest.mark.parametrize("page", [1, 16, 32, 64])
def test_a_long_sequence_among_short_ones(page: int, kv_len: int, facts: dict[str, Any]) -> None:
    """A split sequence beside short ones, causal and not."""
    both = (True, False) if kv_len < 8000 else (page in {1, 32},)  # float64 is slow
    for is_causal, q_len in product(both, (1, 3) if kv_len < 8000 else (2,)):
        seqs = ((q_len, kv_len), (3, 11), (1, 0), (2, 79))
        heads = 16 if kv_len > 514 else 64
        case = batch_case("", seqs, page_size=page, heads=heads, is_causal=is_causal, **facts)

        _check(case, f"{q_len} query tokens, {'causal' if is_causal else 'all'}")


@pytest.mark.parametrize("facts", _ALL.values(), ids=_ALL)
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all"])
def test_split_sequences_of_many_heads(is_causal: bool, heads: int, facts: dict[str, Any]) -> None:
    """A long sequence of many heads with several query tokens, beside a short one."""
    seqs = ((3, 2743), (1, 70))

    _check(batch_case("", seqs, page_size=16, heads=heads, is_causal=is_causal, **facts))


@pytest.mark.parametrize("facts", _ALL.values(), ids=_ALL)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("q_len", [1, 3])
def test_157_sequences(q_len: int, page: int, facts: dict[str, Any]) -> None:
    """More sequences than SMs, of different lengths."""
    lens = (17, 33, 75, 5, 0)
    seqs = tuple((q_len, lens[index % 5]) for index in range(157))

    _check(batch_case("", seqs, page_size=page, heads=16, **facts))


@pytest.mark.parametrize("facts", _ALL.values(), ids=_ALL)
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 6, 7])
def test_pages_with_nan_past_the_last_token(batch: int, facts: dict[str, Any]) -> None:
    """NaN rows in the last page of a sequence reach no result."""
    for page, kv_len, q_len in product((16, 32), (17, 33, 75, 197), (3, 7, 17)):
        case = batch_case("", ((q_len, kv_len),) * batch, page_size=page, heads=4, **facts)

        _check(case, f"{q_len} over {kv_len}, page {page}")


@pytest.mark.parametrize("facts", _ALL.values(), ids=_ALL)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("page", [1, 64])
def test_caches_without_rope(page: int, is_causal: bool, facts: dict[str, Any]) -> None:
    """Head dims without rope, whole and split."""
    seqs = ((2, 2743), (3, 17), (1, 0))

    _check(batch_case("", seqs, page_size=page, is_causal=is_causal, qk_rope_head_dim=0, **facts))


@pytest.mark.parametrize("facts", _E4M3.values(), ids=_E4M3)
@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
def test_magnitudes(scale: float, facts: dict[str, Any]) -> None:
    """Queries of small and large magnitude, over e4m3."""
    for page in (1, 64):
        seqs = ((2, 200), (1, 514))

        _check(batch_case("", seqs, page_size=page, query_magnitude=scale, **facts))
