"""Grids of MLA decode on a GPU: the parameters of FlashInfer's tests and more, as products."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.problems.entry_points import ENTRY_POINTS, compute
from tests.problems.mla import KINDS, SEPARATE_KINDS, SPARSE_KINDS, MlaCase, mla_case

_TWO_KINDS = ("bf16", "e4m3")
_ODD_KINDS = [kind for kind in KINDS if kind not in _TWO_KINDS]
_PDL = (None, True, False)


def _lens(batch: int, longest: int, step: int = 7) -> tuple[int, ...]:
    return tuple((longest - index * step) % longest + 1 for index in range(batch))


# Large batches are few and have short sequences, since float64 is slow.
_BATCHES = (
    *product((1, 2, 4, 16), (64, 128), (32, 64), (1, 2)),
    *((64, 64, 32, 1), (64, 64, 64, 2), (64, 128, 64, 1), (64, 128, 32, 2)),
    *((256, 64, 64, 2), (256, 128, 32, 1)),
)
CASES = (
    # FlashInfer's batch sizes.
    *(
        mla_case(
            kind,
            seq_lens=_lens(batch, {1: 1024, 2: 700, 4: 300, 16: 120}.get(batch, 40)),
            heads=heads,
            page_size=page,
            q_len=q_len,
        )
        for kind, (batch, heads, page, q_len) in product(_TWO_KINDS, _BATCHES)
    ),
    # Every number of query tokens, for head counts that fill a tile and that do not.
    *(
        mla_case(kind, seq_lens=(q_len - 1, 70 + q_len), heads=heads, q_len=q_len, with_sinks=True)
        for kind, heads, q_len in product(
            _TWO_KINDS, (6, 8, 12, 16, 24, 32, 48), (*range(2, 10), 16, 32)
        )
    ),
    *(
        mla_case(kind, seq_lens=(0, 1, q_len, 90), heads=heads, q_len=q_len, with_sinks=True)
        for kind, heads, q_len in product(_ODD_KINDS, (24, 48, 100, 128), (2, 5))
    ),
    # Long sequences with several query tokens and sinks, and with separate values.
    *(
        mla_case(
            kind,
            seq_lens=(2600, 1, 0),
            heads=128,
            q_len=2,
            page_size=page,
            with_sinks=True,
            output_scale=0.7,
        )
        for kind, page in product(KINDS, (32, 64))
    ),
    *(
        mla_case(kind, seq_lens=(3500, 70), heads=heads, q_len=q_len, values=values)
        for kind, values, heads, q_len in product(
            [kind for kind in SEPARATE_KINDS if kind != "fp16 over e4m3"],
            ("other pages", "other cache"),
            (16, 64, 128),
            (1, 3),
        )
    ),
    # Models without rope.
    *(
        mla_case(
            kind,
            seq_lens=(2600, q_len, 0, 70),
            heads=heads,
            q_len=q_len,
            page_size=page,
            with_sinks=True,
            output_scale=0.7,
            qk_rope_head_dim=0,
        )
        for kind, heads, q_len, page in product(
            ("bf16", "fp16", "e4m3"), (8, 24, 64, 100), (1, 3), (1, 16, 64)
        )
    ),
    # FlashInfer's topk, in pages of 32 to 128, with full and shorter lengths.
    *(
        mla_case(
            kind,
            seq_lens=(top_k + 5, 17, 0) if top_k < 2048 else (top_k + 5, 17),
            heads=heads,
            q_len=q_len,
            top_k=top_k,
            page_size=page,
            with_top_k_lens=with_lens,
            with_sinks=with_lens,
        )
        for kind, heads, top_k, q_len, (page, with_lens) in product(
            SPARSE_KINDS, (64, 128), (128, 2048), (1, 2), ((64, False), (128, True))
        )
    ),
    *(
        mla_case(
            kind,
            seq_lens=(2500, 40, 9),
            q_lens=(2, 0, 3),
            top_k=2048,
            page_size=32,
            with_top_k_lens=with_lens,
            with_sinks=with_sinks,
        )
        for kind, with_lens, with_sinks in product(SPARSE_KINDS, (False, True), (False, True))
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_lse_are_right(case: MlaCase) -> None:
    """Every element matches float64."""
    problem = case.build("cuda")

    problem.check(*compute(problem))


@pytest.mark.parametrize("kind", SPARSE_KINDS)
@pytest.mark.parametrize("top_k", [0, 128, 2048])
def test_caller_provided_outputs(top_k: int, kind: str) -> None:
    """Output and LSE of the caller hold the result, also in sparse calls."""
    entry = ENTRY_POINTS["trtllm"]
    problem = mla_case(kind, seq_lens=(2600, 70), heads=64, q_len=2, top_k=top_k).build("cuda")
    out, lse = problem.new_out(), torch.full((4, 64), float("nan"), device="cuda")

    result = entry.call(problem, out=out, lse=lse, return_lse=True)

    assert result[0] is out
    assert result[1] is lse
    problem.check(out, lse)


def _check_with_pdl(name: str, case: MlaCase, **changes: Any) -> None:
    """Fail unless a call is right for any enable_pdl."""
    problem = case.build("cuda")
    expected = problem.expected()
    for enable_pdl in _PDL:
        out = ENTRY_POINTS[name].run(problem, enable_pdl=enable_pdl, **changes)
        problem.check(out, expected=expected, what=f"enable_pdl {enable_pdl}: ")


@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("batch", [1, 4, 16, 64])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_xqa_signature(scale: float, batch: int, page: int, kind: str) -> None:
    """Scores take the first scale only, for any scales and any enable_pdl."""
    case = mla_case(
        kind,
        seq_lens=_lens(batch, 514 if batch <= 4 else 60, 3),
        heads=128 if batch <= 4 else 16,
        page_size=page,
        score_scale=scale * 192**-0.5,
        output_scale=scale,
    )

    _check_with_pdl("xqa_batch_mla", case)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("page", [32, 64])
@pytest.mark.parametrize(
    "lens",
    [*((length,) * batch for batch in (1, 2) for length in (2, 15, 256, 514, 2048)), (0, 514, 2)],
    ids=str,
)
def test_xqa_mla(lens: tuple[int, ...], page: int, kind: str) -> None:
    """Every scale of query and cache, and enable_pdl; values have a cache of their own."""
    for q_scale, kv_scale in product((1.0, 0.5), (1.0, 0.5)):
        case = mla_case(
            kind,
            seq_lens=lens,
            heads=128 if len(lens) < 2 else 16,
            page_size=page,
            values="other cache",
            score_scale=q_scale * 192**-0.5,
            output_scale=kv_scale,
            bmm2_scales_scores=True,
        )

        _check_with_pdl("xqa_mla", case)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [70, 3000], ids=["whole", "split"])
def test_dominant_sinks(length: int, kind: str) -> None:
    """Sinks of 30 and of -30 take all of the weight and none."""
    case = mla_case(kind, seq_lens=(length, 3, 0), q_len=2, with_sinks=True)
    sinks = torch.tensor([30.0, -30.0] * 8, device="cuda")
    problem = replace(case.build("cuda"), sinks=sinks)

    problem.check(*compute(problem))


@pytest.mark.parametrize("kind", _TWO_KINDS)
@pytest.mark.parametrize("rank", [512, 256])
@pytest.mark.parametrize("layout", ["3-D", "[P,1,ps,d]", "[P,ps,1,d]", "strided"])
def test_cache_layouts(layout: str, rank: int, kind: str) -> None:
    """Every cache layout, with scales on the device and any enable_pdl."""
    facts: dict[str, Any] = {"seq_lens": (70, 3, 0, 64), "score_scale": 0.05, "output_scale": 1.5}
    case = mla_case(kind, cache_layout=layout, kv_lora_rank=rank, **facts)
    scales = {"bmm1_scale": torch.tensor(0.05).cuda(), "bmm2_scale": torch.tensor([1.5]).cuda()}

    _check_with_pdl("trtllm", case, **scales)
