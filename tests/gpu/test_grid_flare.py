"""Grids of flare_mla_decoding on a GPU: masks and formats, whole and split, few and many heads."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from mlagen.mla.masks import MaterializedMask
from tests.problems.flare import FORMS, decode, flare_case
from tests.problems.masks import MASKS
from tests.problems.mla import KINDS, MlaCase
from tests.problems.reference import assert_close, output_tolerance

_FORMATS = ("bf16", "fp16", "e4m3", "fp8_per_token")
_128_HEADS: dict[str, Any] = {"seq_lens": (2600, 5, 70), "q_lens": (2, 1, 4), "heads": 128}

# Cases, each with the rows of a padded sequence; None for ragged queries only.
CASES: list[tuple[MlaCase, int | None]] = [
    *(
        (flare_case(mask=mask, **FORMS[form][0], **KINDS[kind]), 5)
        for kind, form, mask in product(_FORMATS[1:], ("ragged", "split"), MASKS)
    ),
    *(
        (flare_case(mask=mask, heads=heads, **KINDS[kind]), None)
        for kind, heads, mask in product(
            _FORMATS, (1, 5, 16, 64), ("all", "causal", "window of 3", "numbers of each head")
        )
    ),
    *(
        (flare_case(page_size=page, **_128_HEADS, **KINDS[kind]), 4)
        for kind, page in product(_FORMATS, (16, 64, 128))
    ),
    *(
        (flare_case(seq_lens=(20_000, 64), heads=heads, page_size=64, **KINDS[kind]), None)
        for kind, heads in product(_FORMATS, (4, 128))
    ),
    *(
        (flare_case(seq_lens=(30_000, 128, 5000), heads=heads, page_size=128, **KINDS[kind]), None)
        for kind, heads in product(("bf16", "fp8_per_token"), (1, 16, 128))
    ),
]


@pytest.mark.parametrize(("case", "pad_to"), CASES, ids=str)
def test_output_is_right(case: MlaCase, pad_to: int | None) -> None:
    """Every element matches float64, ragged and padded, and padding is zeros."""
    problem = case.build("cuda")

    problem.check(decode(problem))
    if pad_to is not None:
        problem.check(decode(problem, pad_to=pad_to))


@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("masked", [40, 64, 65, 130, 200])
@pytest.mark.parametrize("length", [200, 3000], ids=["whole", "split"])
def test_the_lowest_float32_as_a_bias(length: int, masked: int, kind: str) -> None:
    """The lowest float32 as a bias gives finite rows, and masks beside any other bias.

    A row without another bias is not compared: in float32 all its scores are equal.
    """
    lens = (length, 130, 7)
    problem = flare_case(seq_lens=lens, q_lens=(2, 1, 3), **KINDS[kind]).build("cuda")
    numbers = torch.zeros(3, 4, length)
    numbers[..., :masked] = torch.finfo(torch.float32).min
    first = torch.tensor([length - 2, 129, 4], dtype=torch.int32, device="cuda")

    out = decode(problem, mask=MaterializedMask(numbers.cuda(), start_pos=first))

    seen = [len(tokens.keys) for tokens in problem.visible]
    row = numbers[0, :1].double()
    wanted = problem.with_bias([row[:, :count].expand(6, -1) for count in seen]).expected()
    assert out.isfinite().all()
    tolerance = output_tolerance(out.dtype, wanted, problem.math_dtype)
    is_compared = torch.tensor([count > masked for count in seen])
    assert_close(out.cpu()[is_compared], wanted.out[is_compared], tolerance[is_compared], "out")
