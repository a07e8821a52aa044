"""Packed kernel parameters."""

from __future__ import annotations

import struct

import pytest

from mlagen.errors import ArgumentError
from mlagen.runtime.packing import ParameterPacking
from mlagen.spec.kernel import KernelSpec
from tests.kernels import COMBINE, gqa_sm80, gqa_sm90, mla_sm80, mla_sm90

PACKING = ParameterPacking(COMBINE)


@pytest.mark.parametrize(
    "spec", [mla_sm80(), mla_sm90(), gqa_sm80(), gqa_sm90(), COMBINE], ids=lambda spec: spec.family
)
def test_maps_and_constants_are_one_value_each(spec: KernelSpec) -> None:
    """All maps are one value, all constants another, and others have the name of their field."""
    packing, maps = ParameterPacking(spec), [""]
    for field in spec.parameters:
        is_map = field.cuda_type == "TensorMap"
        name = "maps" if is_map else spec.symbol if field.is_constant else field.name
        if name != maps[-1]:
            maps.append(name)

    assert packing.names == tuple(maps[1:])
    assert packing.struct.size == struct.calcsize("<" + "".join(f.code for f in spec.parameters))


def test_scalars_are_packed_by_name_in_order() -> None:
    """Values of other fields are ignored, and a missing value is an error."""
    values = {"num_splits": 3, "heads": 2, "total_rows": 1, "of another kernel": 4}

    assert PACKING.pack_constants(values) == struct.pack("<qii", 1, 2, 3)
    with pytest.raises(struct.error):
        PACKING.pack_constants(values | {"heads": "two"})
    with pytest.raises(KeyError):
        PACKING.pack_constants({"heads": 2, "num_splits": 3})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 2**31}, "heads: expected an int of 32 bits, got 2147483648"),
        ({"total_rows": 2**63}, "total_rows: expected an int of 64 bits, got 9223372036854775808"),
    ],
)
def test_an_integer_overflow_is_rejected(change: dict[str, int], message: str) -> None:
    """Expanded views of one element may have shapes that overflow a parameter."""
    with pytest.raises(ArgumentError) as caught:
        PACKING.pack_constants({"num_splits": 3, "heads": 2, "total_rows": 1} | change)

    assert str(caught.value) == message
