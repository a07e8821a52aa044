"""Tests of data types and row sizes."""

from __future__ import annotations

import pytest

from mlagen.spec.dtype import DType


@pytest.mark.parametrize(
    ("dtype", "name", "tag"),
    [
        (DType.BF16, "bf16", "Bf16"),
        (DType.FP16, "fp16", "Fp16"),
        (DType.E4M3, "e4m3", "E4m3"),
        (DType.FP8_DS_MLA, "fp8_ds_mla", "Fp8DsMla"),
    ],
    ids=["bf16", "fp16", "e4m3", "fp8_ds_mla"],
)
def test_names_of_a_dtype(dtype: DType, name: str, tag: str) -> None:
    """The text of a dtype is stable, and the templates have a tag type for it."""
    names = (str(dtype), DType(name), dtype.cuda_name)

    assert names == (name, dtype, tag)


@pytest.mark.parametrize(
    ("dtype", "elements", "size"),
    [
        (DType.BF16, 576, 1152),
        (DType.FP16, 128, 256),
        (DType.E4M3, 576, 576),
        (DType.INT8, 128, 128),
        (DType.NVFP4, 128, 64),
        (DType.FP8_DS_MLA, 576, 656),
        (DType.FP8_PER_TOKEN, 576, 640),
    ],
    ids=str,
)
def test_row_bytes(dtype: DType, elements: int, size: int) -> None:
    """A row has the size of its elements; rows with inline scales have a fixed size."""
    taken = dtype.row_bytes(elements)

    assert taken == size


def test_only_16_bit_types_need_no_conversion() -> None:
    """The tensor cores read bf16 and fp16 directly."""
    taken = [dtype for dtype in DType if dtype.is_16bit]

    assert taken == [DType.BF16, DType.FP16]
