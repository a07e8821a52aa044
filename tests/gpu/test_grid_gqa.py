"""Grids of GQA decode on a GPU: the parameters of FlashInfer's tests and more, as products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from mlagen.decode import trtllm_batch_decode_with_kv_cache
from tests.problems.entry_points import (
    E4M3_FACTOR,
    decode_gqa_with_lse,
    run_xqa_with_lse,
    trtllm_gqa_arguments,
    trtllm_gqa_with_lse,
)
from tests.problems.gqa import KINDS, SOME_KINDS, GqaCase, GqaProblem, gqa_case
from tests.problems.gqa_cases import DRAFT_SHAPES, FLASHINFER_KINDS, RAGGED, SHAPES, shape_facts

Run = Callable[[GqaProblem], tuple[torch.Tensor, torch.Tensor]]

BOTH = (False, True)  # without and with sinks
MASKS = (None, "causal", "full", "random")
_BOTH_KINDS = ("bf16 over 16-bit", "bf16 over e4m3")
_PDL = [partial(run_xqa_with_lse, enable_pdl=True), partial(run_xqa_with_lse, enable_pdl=False)]


def _build(kind: str, seq_lens: tuple[int, ...], **facts: Any) -> GqaProblem:
    return gqa_case(kind, seq_lens=seq_lens, sink=3.0, **facts).build("cuda")


def check(
    problem: GqaProblem,
    *,
    runs: Sequence[Run] = (decode_gqa_with_lse,),
    layouts: Sequence[str] = ("NHD", "HND"),
    **variants: Any,
) -> None:
    """Fail unless every run of every variant is right in every layout of the cache."""
    for variant in problem.variants(**variants):
        expected, case = variant.expected(), variant.case
        for layout, run in product(layouts, runs):
            out, lse = run(replace(variant, case=replace(case, layout=layout)))
            what = f"{case}, {layout}, sinks {variant.sinks is not None}: "
            variant.check(out, lse, expected=expected, what=what)


@pytest.mark.parametrize("kind", FLASHINFER_KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, (256, 1, 64, 4, 8, 128)], ids=str)
def test_flashinfers_shapes(shape: tuple[int, ...], kind: str) -> None:
    """Every shape and cache dtype, under each window, sink, mask and layout."""
    batch, q_len, *_ = shape
    lens = (110, 200, 97, 111) if batch <= 16 else (110, 20, 40, 17, 5, 30, 64, 1)
    seq_lens = tuple(lens[index % len(lens)] for index in range(batch))
    problem = _build(kind, seq_lens, **shape_facts(shape))
    masks = ("causal", "full") if q_len > 1 else (None,)

    check(problem, windows=(0, 128) if batch <= 128 else (0, 20), sinks=BOTH, masks=masks)


@pytest.mark.parametrize("length", [300, 30_000])
@pytest.mark.parametrize("kind", _BOTH_KINDS)
@pytest.mark.parametrize("shape", DRAFT_SHAPES, ids=str)
def test_drafts_in_a_window(shape: tuple[int, ...], kind: str, length: int) -> None:
    """Windows of 64 and 128 over draft tokens, with and without sinks, under each mask."""
    lens = (length, 300, 63 + shape[0], shape[0])
    problem = _build(kind, lens, **shape_facts((len(lens), *shape, 128)))
    layouts = ("NHD",) if length > 300 else ("NHD", "HND")

    check(problem, layouts=layouts, windows=(64, 128), sinks=BOTH, masks=MASKS)


@pytest.mark.parametrize("length", [300, 30_000])
@pytest.mark.parametrize("kind", _BOTH_KINDS)
@pytest.mark.parametrize("q_lens", RAGGED, ids=str)
def test_ragged_drafts(q_lens: tuple[int, ...], kind: str, length: int) -> None:
    """Sequences with different numbers of draft tokens, one with none, one of them long."""
    is_long = length > 300
    problem = _build(kind, (length, 300, 17, 4), q_lens=q_lens, kv_heads=1 if is_long else 2)
    layouts = ("NHD",) if is_long else ("NHD", "HND")

    # float64 is slow over all tokens of a long sequence
    whole: dict[str, Any] = {"sinks": (True,), "masks": ("full",)} if is_long else {}
    check(problem, layouts=layouts, **{"sinks": BOTH, "masks": MASKS} | whole)
    check(problem, layouts=layouts, windows=(128,), sinks=BOTH, masks=MASKS)


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("head_dim", [16, 48, 192, 256, 512])
@pytest.mark.parametrize("q_len", [2, 5])
def test_drafts_of_every_width(q_len: int, head_dim: int, kind: str) -> None:
    """Head dims below and above 128, with draft tokens, masks and windows."""
    problem = _build(kind, (0, 1, q_len, 70, 130), q_len=q_len, head_dim=head_dim)

    check(problem, windows=(0, 20), sinks=BOTH, masks=(None, "full", "random"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "int8" in kind or "nvfp4" in kind])
@pytest.mark.parametrize("q_lens", [(3, 3, 3), (5, 5, 5), (33, 33, 33), (4, 0, 7)], ids=str)
@pytest.mark.parametrize("length", [90, 3000], ids=["whole", "split"])
def test_drafts_over_quantized_caches(length: int, q_lens: tuple[int, ...], kind: str) -> None:
    """8-bit and 4-bit caches with draft tokens: masks, windows and ragged sequences."""
    drafts: dict[str, Any] = {"q_lens": q_lens} if 0 in q_lens else {"q_len": q_lens[0]}
    problem = _build(kind, (length, 70, q_lens[0]), head_dim=64, kv_heads=1, **drafts)

    if length > 90:
        check(problem, layouts=("NHD",), windows=(0, 30), masks=(None, "random"))
    else:
        check(problem, windows=(0, 30), masks=(*MASKS, "blind"))


@pytest.mark.parametrize("kv", ["int8", "e4m3", "e5m2"])
@pytest.mark.parametrize(
    "dims", [(64, 0), (128, 0), (256, 0), (512, 0), (192, 128), (80, 0)], ids=str
)
@pytest.mark.parametrize("kv_heads", [1, 3, 4])
def test_scales_of_tokens(kv_heads: int, dims: tuple[int, int], kv: str) -> None:
    """In rows of any 4 bytes and in tensors, of pages and magnitudes of several kinds."""
    for page_size, exponent, cache_layout in (
        (16, -30, "inline"),
        (64, 8, "inline"),
        (48, 0, "strided"),
    ):
        for q_len, group in ((1, 8), (4, 5)):
            facts: dict[str, Any] = dict(zip(("head_dim", "head_dim_vo"), dims, strict=True))
            case = GqaCase(
                seq_lens=(2600, 70, 9, 0),
                kv=kv,
                has_token_scales=True,
                scale_exponent=exponent,
                cache_layout=cache_layout,
                page_size=page_size,
                kv_heads=kv_heads,
                group=group,
                q_len=q_len,
                sink=3.0,
                **facts,
            )

            masks = (None, "random") if q_len > 1 else (None,)
            check(case.build("cuda"), windows=(0, 200), masks=masks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("soft_cap", [1.0, 30.0, 1e6])
def test_soft_caps(soft_cap: float, head_dim: int, kind: str) -> None:
    """Scores far below a cap, near it and above, of long and short sequences and of drafts."""
    scale = 1.0 / gqa_case(kind, seq_lens=()).deviation
    facts: dict[str, Any] = {"soft_cap": soft_cap, "score_scale": scale, "head_dim": head_dim}
    for q_len, group in ((1, 8), (3, 5)):
        problem = _build(kind, (2600, 9, 0), q_len=q_len, group=group, kv_heads=1, **facts)
        masks = (None, "random") if q_len > 1 else (None,)

        check(problem, layouts=("NHD",), windows=(0, 200), masks=masks)


def _check_servers(kind: str, seq_lens: tuple[int, ...], **facts: Any) -> None:
    for q_len, page_size in ((1, 16), (4, 64), (9, 1)):
        problem = _build(kind, seq_lens, q_len=q_len, page_size=page_size, **facts)
        check(problem, runs=(trtllm_gqa_with_lse,), sinks=BOTH)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_ranks_of_context_parallel(head_dim: int, kind: str) -> None:
    """Ranks with more tokens than their query tokens attend to, with fewer, and with none."""
    for world, rank in ((1, 0), (2, 1), (3, 0), (8, 5)):
        committed = tuple(length * world + more for length, more in ((2600, -7), (70, 5), (9, -30)))
        facts: dict[str, Any] = {"cp_world": world, "cp_rank": rank}
        facts |= {"committed": (*committed, 3), "head_dim": head_dim}
        _check_servers(kind, (2600, 70, 9, 0), **facts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_page_ids_of_values(head_dim: int, kind: str) -> None:
    """Keys and values, and their scales, by two tables."""
    _check_servers(kind, (2600, 70, 0), has_value_tables=True, head_dim=head_dim)


def test_lengths_of_all_ranks_may_change_in_a_graph() -> None:
    """A captured call reads them, and its schedule depends on them at each replay."""
    rank: dict[str, Any] = {"cp_world": 2, "cp_rank": 1, "q_len": 2, "page_size": 64}
    cases = [GqaCase(seq_lens=(700, 70), committed=pair, **rank) for pair in ((1399, 139), (99, 1))]
    problem, other = (case.build("cuda") for case in cases)
    arguments = trtllm_gqa_arguments(problem, return_lse=True)
    problem.check(*trtllm_batch_decode_with_kv_cache(**arguments))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = trtllm_batch_decode_with_kv_cache(**arguments)

    graph.replay()
    problem.check(out, lse)
    arguments["causal_seqlens_kv_global"].copy_(torch.tensor(cases[1].committed))
    graph.replay()

    other.check(out, lse)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [(128, 0), (256, 0), (512, 0), (192, 128), (96, 0)], ids=str)
@pytest.mark.parametrize(("q_len", "mask"), [(1, None), (2, "random")])
def test_split_sequences(q_len: int, mask: str | None, dims: tuple[int, int], kind: str) -> None:
    """Long sequences of keys and values of each head dim: query tokens, a window and sinks."""
    given = dict(zip(("head_dim", "head_dim_vo"), dims, strict=True))
    problem = _build(kind, (2600, 9), q_len=q_len, kv_heads=1, **given)

    check(problem, layouts=("NHD",), windows=(0, 2550), sinks=BOTH, masks=(mask,))


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("q_len", [1, 3])
def test_long_sequences_beside_short_ones(q_len: int, page: int, kind: str) -> None:
    """A split sequence does not change those of about a page, a query or zero tokens."""
    lens = (4000, 0, 1, page - 1, page, page + 1, q_len, 2600)
    problem = _build(kind, lens, q_len=q_len, page_size=page, kv_heads=1, head_dim=64)

    check(problem, windows=(0, 100), sinks=BOTH)


def _with_scale_tensors(problem: GqaProblem) -> tuple[torch.Tensor, torch.Tensor]:
    scales = (problem.case.scale, problem.case.output_scale)
    first, second = (torch.tensor(scale, device="cuda") for scale in scales)
    return decode_gqa_with_lse(problem, bmm1_scale=first[None], bmm2_scale=second)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [70, 3000], ids=["whole", "split"])
def test_dominant_sinks_and_scale_tensors(length: int, kind: str) -> None:
    """Sinks of 30 and of -30, and scales on the device, of zero or one dimension."""
    problem = _build(kind, (length, 3, 0), q_len=2, o_scale=0.25)
    assert problem.sinks is not None
    problem.sinks.copy_(torch.tensor([30.0, -30.0] * 4))

    check(problem, runs=(decode_gqa_with_lse, _with_scale_tensors), layouts=("NHD",))


@pytest.mark.parametrize("enable_pdl", [None, True, False])
@pytest.mark.parametrize("length", [70, 3000], ids=["whole", "split"])
@pytest.mark.parametrize("kind", [*_BOTH_KINDS, "bf16 over e4m3 to e4m3"])
def test_pdl(kind: str, length: int, enable_pdl: bool | None) -> None:
    """enable_pdl changes nothing, whole or split, for any output dtype."""
    problem = _build(kind, (length, 9, 0), q_len=2)

    problem.check(*decode_gqa_with_lse(problem, enable_pdl=enable_pdl))


@pytest.mark.parametrize("kind", FLASHINFER_KINDS)
@pytest.mark.parametrize("group", [8, 16])
@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("lens", [(2, 15, 256, 514), (512,)], ids=["4 sequences", "1 sequence"])
def test_xqa(lens: tuple[int, ...], page: int, head_dim: int, group: int, kind: str) -> None:
    """Every kernel with each number of heads, scale, window, sink, layout and enable_pdl."""
    own = E4M3_FACTOR if KINDS[kind]["out_dtype"] else 1.0
    kv_scales = (1.0,) if "16-bit" in kind else (1.0, 0.5)
    for kv_heads, q_scale, kv_scale in product((2, 4), (1.0, 0.5), kv_scales):
        problem = _build(
            kind,
            lens,
            page_size=page,
            head_dim=head_dim,
            group=group,
            kv_heads=kv_heads,
            score_scale=q_scale * kv_scale / math.sqrt(head_dim),
            output_scale=kv_scale * own,
        )

        check(problem, runs=_PDL, windows=(0, 256), sinks=BOTH)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("q_len", [2, 4, 33])
def test_drafts_of_xqa(q_len: int, kind: str) -> None:
    """Draft tokens under each mask, window and sink, with every kind of cache."""
    problem = _build(kind, (0, 1, q_len, 70, 300), q_len=q_len, kv_heads=1, head_dim=64)
    sinks = BOTH if q_len < 33 else (True,)

    check(
        problem,
        runs=(run_xqa_with_lse,),
        windows=(0, 40),
        sinks=sinks,
        masks=(None, "full", "random"),
    )
