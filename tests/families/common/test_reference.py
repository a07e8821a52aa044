"""Decoding of stored rows to float32."""

from __future__ import annotations

import pytest
import torch

from mlagen.families.common.reference import decoded, scaled_groups, stored_rows
from mlagen.spec.dtype import DType
from tests.problems.mla_rows import store
from tests.problems.problem import POISON

FORMATS = [DType.BF16, DType.FP16, DType.E4M3, DType.FP8_DS_MLA]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_row_is_decoded_to_its_elements(dtype: DType) -> None:
    """Every element is the float32 product of stored element and scale."""
    content = torch.randn(7, 576, generator=torch.Generator().manual_seed(0))
    stored = store(content, 512, str(dtype))

    elements = decoded(stored.rows, dtype)

    assert torch.equal(elements, stored.elements.float())


def test_an_fp8_per_token_row_is_decoded_without_its_scale() -> None:
    """The scale of a 640-byte row is in another tensor, and multiplies all elements."""
    content = torch.randn(7, 576, generator=torch.Generator().manual_seed(0))
    scales = torch.rand(7, generator=torch.Generator().manual_seed(1)) + 0.5
    stored = store(content, 512, "fp8_per_token", scales=scales)

    elements = decoded(stored.rows, DType.FP8_PER_TOKEN)

    assert torch.equal(elements * scales[:, None], stored.elements.float())


def test_groups_of_128_elements_have_a_scale_each() -> None:
    """A short latent part does not use the last scales, even if they are NaN."""
    scales = torch.tensor([[2.0, 3.0, float("nan"), float("nan")]])

    elements = scaled_groups(torch.ones(1, 256), scales)

    assert elements.tolist() == [[2.0] * 128 + [3.0] * 128]


@pytest.mark.parametrize("dtype", [*FORMATS, DType.FP8_PER_TOKEN], ids=str)
def test_poison_is_nan_in_every_format(dtype: DType) -> None:
    """The poison of tests decodes to NaN in every format."""
    rows = torch.full((3, dtype.row_bytes(576)), POISON, dtype=torch.uint8)

    elements = decoded(rows, dtype)

    assert elements.isnan().all()


def test_stored_rows_follow_strides() -> None:
    """Pages and tokens may have padding, and a token may be read twice."""
    cache = torch.arange(4 * 3 * 24, dtype=torch.float32).bfloat16().view(4, 3, 24)[:, :2, :16]

    rows = stored_rows(cache, torch.tensor([3, 0, 3]), torch.tensor([1, 0, 1]))

    expected = torch.stack([cache[3, 1], cache[0, 0], cache[3, 1]])
    assert torch.equal(rows.view(torch.bfloat16), expected)
