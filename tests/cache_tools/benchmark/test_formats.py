"""Stored formats of random caches."""

from __future__ import annotations

import pytest
import torch

from cache_tools.benchmark.formats import Stored, dequantize, element_scale, random_cache
from mlagen.spec.dtype import DType
from tests.problems import mla_rows

KV_DTYPES = {"bf16", "fp16", "e4m3", "fp8_ds_mla", "int8", "nvfp4"}


@pytest.mark.parametrize("dtype", [each for each in DType if each.value in KV_DTYPES], ids=str)
def test_values_have_about_unit_variance(dtype: DType) -> None:
    """Every format stands for numbers like those of a normal distribution."""
    stored = random_cache(dtype, (64, 576), torch.Generator().manual_seed(0))

    values = dequantize(dtype, stored)
    assert values.shape == (64, 576)
    assert float(values.mean()) == pytest.approx(0, abs=0.05)
    assert float(values.std()) == pytest.approx(1, rel=0.1)


def test_nvfp4_has_two_elements_a_byte_and_a_scale_for_16() -> None:
    """The first element is the lower half, whose highest bit is the sign."""
    data = torch.tensor([[0x2F, 0x10, *[0] * 6]], dtype=torch.uint8)
    scales = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)

    values = dequantize(DType.NVFP4, Stored(data=data, block_scales=scales))

    assert values.tolist() == [[-12.0, 2.0, 0.0, 1.0, *[0.0] * 12]]


def test_int8_values_carry_the_scale_of_the_call() -> None:
    """The call's scale is not part of the stored elements."""
    values = dequantize(DType.INT8, Stored(data=torch.tensor([[64]], dtype=torch.int8)))

    assert values.item() == 64 * element_scale(DType.INT8) == 2.0


def test_fp8_ds_mla_rows_are_those_of_the_kernels() -> None:
    """Packed rows decode to the elements that the kernel tests expect of the same bytes."""
    stored = random_cache(DType.FP8_DS_MLA, (5, 576), torch.Generator().manual_seed(0))

    values = dequantize(DType.FP8_DS_MLA, stored)

    assert stored.data.shape == (5, 656)
    again = mla_rows.store(values, 512, "fp8_ds_mla")
    assert torch.equal(again.rows, stored.data)
    assert torch.equal(again.elements.float(), values)
