"""Grids of BatchMLA on a GPU: the parameters of FlashInfer's tests and more, as products."""

from __future__ import annotations

from itertools import product

import pytest

from tests.problems.batch_mla import batch_case, run_with_lse, wrapper_of
from tests.problems.mla import KINDS, MlaCase

_E4M3 = [KINDS[kind] for kind in KINDS if kind.startswith("bf16 over e4m3 with")]
_ALL = [KINDS["bf16"], KINDS["fp16"], *_E4M3]
_CAUSAL = (True, False)


CASES = (
    # FlashInfer's lengths, with few and many query tokens; float64 is slow for more.
    *(
        batch_case(
            tuple((q_len, max(0, kv_len - index)) for index in range(batch)),
            page_size=page,
            heads=heads,
            is_causal=is_causal,
            **facts,
        )
        for facts, page, heads, batch, kv_len, q_len, is_causal in product(
            _ALL,
            (1, 16),
            (16, 64),
            (1, 3, 5, 7),
            (0, 17, 33, 96, 97, 114, 514, 1024),
            (1, 7),
            _CAUSAL,
        )
        if batch == 1 or kv_len in {0, 17, 33, 97, 114}
        if q_len == 1 or not (kv_len > 514 or (heads == 64 and batch > 3))
    ),
    # Every odd number of query tokens up to 17, over shorter and longer KV lengths.
    *(
        batch_case(
            tuple((q_len, kv_len) for kv_len in (0, 1, 3, 11, 17, 33, 79)),
            page_size=page,
            heads=heads,
            is_causal=is_causal,
            **facts,
        )
        for facts, q_len, (page, heads), is_causal in product(
            _ALL, range(1, 18, 2), ((1, 16), (16, 64), (64, 6)), _CAUSAL
        )
    ),
    # A split sequence beside short ones.
    *(
        batch_case(
            ((q_len, kv_len), (3, 11), (1, 0), (2, 79)),
            page_size=page,
            heads=16 if kv_len > 514 else 64,
            is_causal=is_causal,
            **facts,
        )
        for facts, page, (kv_len, q_len), is_causal in product(
            _ALL, (1, 16, 32, 64), ((514, 1), (514, 3), (2743, 1), (2743, 3), (8736, 2)), _CAUSAL
        )
        if kv_len < 8000 or is_causal is (page in {1, 32})
    ),
    *(
        batch_case(((3, 2743), (1, 70)), page_size=16, heads=heads, is_causal=is_causal, **facts)
        for facts, heads, is_causal in product(_ALL, (64, 128), _CAUSAL)
    ),
    # More sequences than SMs, of different lengths.
    *(
        batch_case(
            tuple((q_len, (17, 33, 75, 5, 0)[index % 5]) for index in range(157)),
            page_size=page,
            **facts,
        )
        for facts, page, q_len in product(_ALL, (1, 16), (1, 3))
    ),
    # NaN rows in the last page of a sequence.
    *(
        batch_case(((q_len, kv_len),) * batch, page_size=page, heads=4, **facts)
        for facts, batch, page, kv_len, q_len in product(
            _ALL, range(1, 8), (16, 32), (17, 33, 75, 197), (3, 7, 17)
        )
    ),
    # Head dims without rope, whole and split.
    *(
        batch_case(
            ((2, 2743), (3, 17), (1, 0)),
            page_size=page,
            is_causal=is_causal,
            qk_rope_head_dim=0,
            **facts,
        )
        for facts, page, is_causal in product(_ALL, (1, 64), _CAUSAL)
    ),
    # Queries of small and large magnitude.
    *(
        batch_case(((2, 200), (1, 514)), page_size=page, query_magnitude=scale, **facts)
        for facts, scale, page in product(_E4M3, (0.01, 1.0, 20.0), (1, 64))
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_lse_are_right(case: MlaCase) -> None:
    """Every element matches float64."""
    problem = case.build("cuda")

    problem.check(*run_with_lse(wrapper_of(problem), problem))
