"""Grids of flare_mla_decoding on a GPU: masks and formats, whole and split, few and many heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mlagen.mla.masks import MaterializedMask
from tests.flare_masks import MASKS, Rule
from tests.flare_problems import (
    FORMATS,
    LONG,
    RAGGED,
    check,
    decode,
    expected,
    flare_case,
    pad,
    placed,
)
from tests.problems.mla import MlaCase, MlaProblem
from tests.problems.problem import E4M3
from tests.reference import assert_close, output_tolerance

DEVICE = "cuda"
_OTHERS = {name: FORMATS[name] for name in ("fp16", "e4m3", "packed")}


def _check_padded(problem: MlaProblem, rule: Rule, q_len: int) -> None:
    """Fail unless a padded problem is right, and its padding zeros."""
    padded = pad(problem, q_len=q_len)
    out = decode(
        problem, rule, q=padded.query, valid_length=padded.valid, ragged=False, padded=padded
    )
    check(problem, rule, out[padded.is_token])
    assert (out[~padded.is_token] == 0).all()


def _in_format(case: MlaCase, like: MlaCase) -> MlaCase:
    return replace(case, dtype=like.dtype, kv_format=like.kv_format)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("row_format", _OTHERS.values(), ids=_OTHERS)
@pytest.mark.parametrize("case", [RAGGED, LONG], ids=["short", "split"])
def test_every_mask_over_every_format(case: MlaCase, row_format: MlaCase, name: str) -> None:
    """Every format works with every mask, ragged and padded, whole and split."""
    problem, rule = _in_format(case, row_format).build(DEVICE), MASKS[name]

    check(problem, rule, decode(problem, rule))
    _check_padded(problem, rule, q_len=5)


@pytest.mark.parametrize("name", ["all", "causal", "window of 3", "numbers of each head"])
@pytest.mark.parametrize("row_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("heads", [1, 5, 16, 64])
def test_some_heads(heads: int, row_format: MlaCase, name: str) -> None:
    """Head counts that fill a tile and that do not, under masks by position and by head."""
    problem = replace(_in_format(RAGGED, row_format), heads=heads).build(DEVICE)
    rule = MASKS[name]

    check(problem, rule, decode(problem, rule))


@pytest.mark.parametrize("row_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("page", [16, 64, 128])
def test_128_heads(page: int, row_format: MlaCase) -> None:
    """DeepSeek's number of heads, with padding, whole and split."""
    lens = ((2600, 5, 70), (2, 1, 4))
    case = flare_case(seq_lens=lens[0], q_lens=lens[1], heads=128, page_size=page)
    problem, rule = _in_format(case, row_format).build(DEVICE), MASKS["all"]

    check(problem, rule, decode(problem, rule))
    _check_padded(problem, rule, q_len=4)


@pytest.mark.parametrize("row_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("heads", [4, 128])
def test_20000_tokens(heads: int, row_format: MlaCase) -> None:
    """A cache of 20,000 tokens, split over the SMs."""
    case = flare_case(seq_lens=(20_000, 64), q_lens=(1, 1), heads=heads, page_size=64)
    problem, rule = _in_format(case, row_format).build(DEVICE), MASKS["all"]

    check(problem, rule, decode(problem, rule))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, E4M3], ids=["bf16", "fp16", "e4m3"]
)
@pytest.mark.parametrize("masked", [40, 64, 65, 130, 200])
@pytest.mark.parametrize("length", [200, 3000], ids=["whole", "split"])
def test_the_lowest_float32_as_a_bias(length: int, masked: int, dtype: torch.dtype) -> None:
    """The lowest float32 as a bias gives finite rows, and masks beside any other bias.

    A row without another bias is not compared: in float32 all its scores are equal.
    """
    lens = (length, 130, 7)
    case = flare_case(seq_lens=lens, q_lens=(2, 1, 3), dtype=dtype)
    problem = case.build(DEVICE)
    numbers = torch.zeros(3, 4, length)
    numbers[..., :masked] = torch.finfo(torch.float32).min
    first = torch.tensor([length - 2, 129, 4], dtype=torch.int32, device=DEVICE)
    mask = MaterializedMask(numbers.to(DEVICE), start_pos=first)

    out = decode(problem, replace(MASKS["all"], mask=lambda *_: mask))

    bias = []
    for _, _, seen in zip(*placed(problem), strict=True):
        row = torch.zeros(6, seen, dtype=torch.float64)
        row[:, :masked] = torch.finfo(torch.float32).min
        bias.append(row)
    wanted = expected(problem, MASKS["all"], bias)
    assert out.isfinite().all()
    tolerance = output_tolerance(out.dtype, wanted, problem.math_dtype)
    is_compared = torch.tensor([row.shape[1] > masked for row in bias])
    assert_close(out.cpu()[is_compared], wanted.out[is_compared], tolerance[is_compared], "out")
