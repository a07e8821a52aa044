"""Grids of flashinfer.xqa on a GPU: the parameters of FlashInfer's tests and more, as products."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch

from tests.gqa_cases import DTYPES, Dtypes
from tests.gqa_variants import check_all, variants
from tests.problems.entry_points import run_xqa, run_xqa_mla
from tests.problems.gqa import GqaCase, GqaProblem
from tests.problems.mla import MlaCase
from tests.problems.problem import E4M3
from tests.reference import assert_close, output_tolerance
from tests.xqa_semantics import E4M3_FACTOR

DEVICE = "cuda"
SCALES = (1.0, 0.5)
_PDL: dict[str, Callable[[GqaProblem], torch.Tensor]] = {
    "early": partial(run_xqa, enable_pdl=True),
    "in order": partial(run_xqa, enable_pdl=False),
}


@pytest.mark.parametrize("dtypes", DTYPES[:6], ids=str)
@pytest.mark.parametrize("group", [8, 16])
@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("lens", [(2, 15, 256, 514), (512,)], ids=["4 sequences", "1 sequence"])
def test_flashinfers_grid(
    lens: tuple[int, ...], page: int, head_dim: int, group: int, dtypes: Dtypes
) -> None:
    """Every kernel with each number of heads, scale, window, sink, layout and enable_pdl."""
    own = E4M3_FACTOR if dtypes.out_dtype is E4M3 else 1.0
    kv_scales = SCALES if dtypes.kv != "16-bit" else (1.0,)
    for kv_heads, q_scale, kv_scale in product((2, 4), SCALES, kv_scales):
        case = GqaCase(
            name="",
            seq_lens=lens,
            page_size=page,
            head_dim=head_dim,
            group=group,
            kv_heads=kv_heads,
            dtype=dtypes.dtype,
            kv=dtypes.kv,
            out_dtype=dtypes.out_dtype,
            score_scale=q_scale * kv_scale / math.sqrt(head_dim),
            output_scale=kv_scale * own,
            sink=3.0,
        )

        for name, problem in variants(case.build(DEVICE), windows=(0, 256), sinks=(False, True)):
            what = f"{kv_heads} kv heads, q_scale {q_scale}, kv_scale {kv_scale}, {name}"
            check_all(problem, _PDL, what)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [2, 4, 33])
def test_drafts(q_len: int, dtypes: Dtypes) -> None:
    """Draft tokens under each mask, window and sink, with every kind of cache."""
    case = GqaCase(
        name="",
        seq_lens=(0, 1, q_len, 70, 300),
        q_len=q_len,
        kv_heads=1,
        head_dim=64,
        dtype=dtypes.dtype,
        kv=dtypes.kv,
        out_dtype=dtypes.out_dtype,
        output_scale=1.0 if dtypes.kv == "16-bit" else 0.5,
        sink=3.0,
    )

    for name, problem in variants(
        case.build(DEVICE),
        windows=(0, 40),
        sinks=(False, True) if q_len < 33 else (True,),
        masks=(None, "full", "random"),
    ):
        check_all(problem, {"xqa": run_xqa}, name)


_MLA_DTYPES = {"e4m3": E4M3, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("dtype", _MLA_DTYPES.values(), ids=_MLA_DTYPES)
@pytest.mark.parametrize("page", [32, 64])
@pytest.mark.parametrize(
    "lens",
    [*((length,) * batch for batch in (1, 2) for length in (2, 15, 256, 514, 2048)), (0, 514, 2)],
    ids=str,
)
def test_flashinfers_grid_of_mla(lens: tuple[int, ...], page: int, dtype: torch.dtype) -> None:
    """Every scale of query and cache, and enable_pdl; values have a cache of their own."""
    for q_scale, kv_scale in product(SCALES, SCALES):
        case = MlaCase(
            name="",
            seq_lens=lens,
            heads=128 if len(lens) < 2 else 16,
            page_size=page,
            dtype=dtype,
            values="other cache",
            score_scale=q_scale * 192**-0.5,
            output_scale=kv_scale,
            scores_take_bmm2=True,
        )
        problem = case.build(DEVICE)
        expected = problem.expected()

        for enable_pdl in (None, True, False):
            out = run_xqa_mla(problem, enable_pdl=enable_pdl)

            tolerance = output_tolerance(out.dtype, expected, problem.math_dtype)
            what = f"q_scale {q_scale}, kv_scale {kv_scale}, enable_pdl {enable_pdl}: out"
            assert_close(out.reshape(expected.out.shape), expected.out, tolerance, what)
