"""Element types and packed rows."""

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
    ids=["bf16", "fp16", "e4m3", "packed rows"],
)
def test_a_dtype_has_one_name_for_people_and_one_for_templates(
    dtype: DType, name: str, tag: str
) -> None:
    """Its text is stable, and the templates know it by the name of a tag type."""
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
def test_a_row_has_the_size_of_its_elements(dtype: DType, elements: int, size: int) -> None:
    """Packed rows have the one size that their name says."""
    taken = dtype.row_bytes(elements)

    assert taken == size


def test_the_tensor_cores_take_16_bits() -> None:
    """Everything else is decoded first."""
    taken = [dtype for dtype in DType if dtype.is_16bit]

    assert taken == [DType.BF16, DType.FP16]
