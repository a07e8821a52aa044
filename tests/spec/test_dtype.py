"""Element types."""

from __future__ import annotations

import pytest

from mlagen.spec.dtype import DType


@pytest.mark.parametrize(
    ("dtype", "name", "tag"),
    [(DType.BF16, "bf16", "Bf16"), (DType.FP16, "fp16", "Fp16")],
    ids=["bf16", "fp16"],
)
def test_a_dtype_has_one_name_for_people_and_one_for_templates(
    dtype: DType, name: str, tag: str
) -> None:
    """Its text is stable, and the templates know it by the name of a tag type."""
    names = (str(dtype), DType(name), dtype.cuda_name)

    assert names == (name, dtype, tag)


@pytest.mark.parametrize("dtype", DType, ids=str)
def test_every_dtype_has_a_size(dtype: DType) -> None:
    """Both supported types take two bytes."""
    size = dtype.bytes

    assert size == 2
