"""Grids of MLA decode on a GPU: the parameters of FlashInfer's tests and more, as products."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import mlagen
from tests.mla_cases import SPARSE_KINDS
from tests.problems.entry_points import compute, decode, decode_with_lse
from tests.problems.mla import KINDS, MlaCase, MlaProblem, mla_case
from tests.reference import assert_close, output_tolerance

DEVICE = "cuda"
_TWO_KINDS = {name: KINDS[name] for name in ("bf16", "e4m3")}
_ODD_KINDS = {name: kind for name, kind in KINDS.items() if name not in _TWO_KINDS}
Kind = tuple[torch.dtype, str, str]


def _check(case: MlaCase, what: str = "") -> MlaProblem:
    """Fail unless output and LSE are right; return the problem."""
    problem = case.build(DEVICE)
    out, lse = compute(problem)
    try:
        problem.check(out, lse)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error
    return problem


# Batch, heads, page size and query tokens; few large batches, since float64 is slow.
_BATCHES = (
    *product((1, 2, 4, 16), (64, 128), (32, 64), (1, 2)),
    *((64, 64, 32, 1), (64, 64, 64, 2), (64, 128, 64, 1), (64, 128, 32, 2)),
    *((256, 64, 64, 2), (256, 128, 32, 1)),
)


@pytest.mark.parametrize("kind", _TWO_KINDS.values(), ids=_TWO_KINDS)
@pytest.mark.parametrize(
    "shape", _BATCHES, ids=[f"{b}x{q}-page{page}-heads{heads}" for b, heads, page, q in _BATCHES]
)
def test_batches(shape: tuple[int, int, int, int], kind: Kind) -> None:
    """FlashInfer's batch sizes, the large ones with short sequences."""
    batch, heads, page, q_len = shape
    longest = {1: 1024, 2: 700, 4: 300, 16: 120}.get(batch, 40)
    lens = tuple((longest - index * 7) % longest + 1 for index in range(batch))

    _check(case_of_kind(kind, name="", seq_lens=lens, heads=heads, page_size=page, q_len=q_len))


@pytest.mark.parametrize("kind", _TWO_KINDS.values(), ids=_TWO_KINDS)
@pytest.mark.parametrize("heads", [6, 8, 12, 16, 24, 32, 48])
def test_query_tokens_of_some_heads(heads: int, kind: Kind) -> None:
    """Every number of query tokens, for head counts that fill a tile and that do not."""
    for q_len in (*range(2, 10), 16, 32):
        lens = (q_len - 1, 70 + q_len)
        case = case_of_kind(kind, name="", seq_lens=lens, heads=heads, q_len=q_len, with_sinks=True)

        _check(case, f"{q_len} query tokens")


@pytest.mark.parametrize("kind", _ODD_KINDS.values(), ids=_ODD_KINDS)
@pytest.mark.parametrize("heads", [24, 48, 100, 128])
def test_query_tokens_over_other_caches(heads: int, kind: Kind) -> None:
    """Other cache formats with many heads and several query tokens."""
    for q_len in (2, 5):
        lens = (0, 1, q_len, 90)
        case = case_of_kind(kind, name="", seq_lens=lens, heads=heads, q_len=q_len, with_sinks=True)

        _check(case, f"{q_len} query tokens")


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("page", [32, 64])
def test_split_with_query_tokens(page: int, kind: Kind) -> None:
    """Long sequences of 128 heads with several query tokens and sinks."""
    case = case_of_kind(
        kind,
        name="",
        seq_lens=(2600, 1, 0),
        heads=128,
        q_len=2,
        page_size=page,
        with_sinks=True,
        output_scale=0.7,
    )

    _check(case)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3", "bf16 over e4m3"])
@pytest.mark.parametrize("values", ["other pages", "other cache"])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_split_with_separate_values(heads: int, values: str, kind: str) -> None:
    """Long sequences whose values have pages of their own."""
    for q_len in (1, 3):
        case = mla_case(kind, name="", seq_lens=(3500, 70), heads=heads, q_len=q_len, values=values)

        _check(case, f"{q_len} query tokens")


@pytest.mark.parametrize("kind", SPARSE_KINDS.values(), ids=SPARSE_KINDS)
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("top_k", [128, 2048])
@pytest.mark.parametrize("q_len", [1, 2])
def test_sparse(q_len: int, top_k: int, heads: int, kind: Kind) -> None:
    """FlashInfer's topk, in pages of 32 to 128, with full and shorter lengths."""
    for page, with_lens in ((64, False), (128, True)):
        case = case_of_kind(
            kind,
            name="",
            seq_lens=(top_k + 5, 17, 0) if top_k < 2048 else (top_k + 5, 17),
            heads=heads,
            q_len=q_len,
            top_k=top_k,
            page_size=page,
            with_top_k_lens=with_lens,
            with_sinks=with_lens,
        )

        _check(case, f"page {page}")


@pytest.mark.parametrize("kind", SPARSE_KINDS.values(), ids=SPARSE_KINDS)
@pytest.mark.parametrize("with_lens", [False, True], ids=["whole lists", "lengths given"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
def test_split_sparse_calls_with_ragged_queries(
    with_sinks: bool, with_lens: bool, kind: Kind
) -> None:
    """Large topk and ragged query lengths."""
    case = case_of_kind(
        kind,
        name="",
        seq_lens=(2500, 40, 9),
        q_lens=(2, 0, 3),
        top_k=2048,
        page_size=32,
        with_top_k_lens=with_lens,
        with_sinks=with_sinks,
    )

    _check(case)


@pytest.mark.parametrize("kind", SPARSE_KINDS.values(), ids=SPARSE_KINDS)
@pytest.mark.parametrize("top_k", [0, 128, 2048])
def test_caller_provided_outputs(top_k: int, kind: Kind) -> None:
    """Output and LSE of the caller hold the result, also in sparse calls."""
    case = case_of_kind(kind, name="", seq_lens=(2600, 70), heads=64, q_len=2, top_k=top_k)
    problem = case.build(DEVICE)
    dtype = torch.bfloat16 if case.dtype is torch.float8_e4m3fn else case.dtype
    out = torch.full((2, 2, 64, 512), math.nan, dtype=dtype, device=DEVICE)
    lse = torch.full((4, 64), math.nan, device=DEVICE)

    result = decode_with_lse(problem, out=out, lse=lse)

    assert result[0] is out
    assert result[1] is lse
    problem.check(out, lse)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("batch", [1, 4, 16, 64])
def test_the_xqa_signature(batch: int, page: int, kind: str) -> None:
    """Scores take the first scale only, for any scales and any enable_pdl."""
    longest = 514 if batch <= 4 else 60
    lens = tuple(longest - index * 3 % longest for index in range(batch))
    for scale in (1.0, 0.5):
        case = mla_case(
            kind,
            name="",
            seq_lens=lens,
            heads=128 if batch <= 4 else 16,
            page_size=page,
            score_scale=scale * 192**-0.5,
            output_scale=scale,
        )
        problem = case.build(DEVICE)
        expected = problem.expected()

        for enable_pdl in (None, True, False):
            out = mlagen.mla.xqa_batch_decode_with_kv_cache_mla(
                **problem.arguments(enable_pdl=enable_pdl)
            )

            tolerance = output_tolerance(out.dtype, expected, problem.math_dtype)
            what = f"scale {scale}, enable_pdl {enable_pdl}: out"
            assert_close(out.reshape(expected.out.shape), expected.out, tolerance, what)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("length", [70, 3000], ids=["whole", "split"])
def test_dominant_sinks(length: int, kind: Kind) -> None:
    """Sinks of 30 and of -30 take all of the weight and none."""
    case = case_of_kind(kind, name="", seq_lens=(length, 3, 0), q_len=2, with_sinks=True)
    problem = case.build(DEVICE)
    sinks = torch.tensor([30.0, -30.0] * 8, device=DEVICE)
    problem = replace(problem, sinks=sinks)

    out, lse = compute(problem)

    problem.check(out, lse)


@pytest.mark.parametrize("kind", _TWO_KINDS.values(), ids=_TWO_KINDS)
@pytest.mark.parametrize("layers", [(512, 64), (256, 64)], ids=["512 + 64", "256 + 64"])
def test_cache_layouts(layers: tuple[int, int], kind: Kind) -> None:
    """Every cache layout, with scales on the device and any enable_pdl."""
    rank, rope = layers
    layouts = ("3-D", "[P,1,ps,d]", "[P,ps,1,d]", "strided")
    for layout, enable_pdl in product(layouts, (None, True, False)):
        case = case_of_kind(
            kind,
            name="",
            seq_lens=(70, 3, 0, 64),
            cache_layout=layout,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            score_scale=0.05,
            output_scale=1.5,
        )
        problem = case.build(DEVICE)
        changes: dict[str, Any] = {
            "enable_pdl": enable_pdl,
            "bmm1_scale": torch.tensor(0.05, device=DEVICE),
            "bmm2_scale": torch.tensor([1.5], device=DEVICE),
        }

        out = decode(problem, **changes)

        problem.check(out)
