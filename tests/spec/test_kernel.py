"""Tests of what every kernel spec has in common."""

from __future__ import annotations

import struct
from dataclasses import FrozenInstanceError, fields

import pytest

from mlagen.errors import ArgumentError
from mlagen.spec.arch import Arch
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
from mlagen.spec.gqa.sm80 import GqaSm80Spec
from mlagen.spec.kernel import KernelSpec, pack_scalars, packing_of
from mlagen.spec.mla.sm80 import MlaSm80Spec
from mlagen.spec.mla.sm90 import MlaSm90Spec
from tests.kernels import COMBINE, gqa_sm80, mla_sm80, mla_sm90

SPECS = (MlaSm80Spec, MlaSm90Spec, GqaSm80Spec, CombineSpec)
SIZES = {"128s": 128, "Q": 8, "q": 8, "i": 4, "f": 4}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)
def test_parameters_have_no_padding(spec: type[KernelSpec]) -> None:
    """Larger fields come first, so native alignment adds no padding."""
    sizes = [SIZES[parameter.code] for parameter in spec.parameters]
    codes = "".join(parameter.code for parameter in spec.parameters)

    assert sizes == sorted(sizes, reverse=True)
    assert struct.calcsize(f"@{codes}") == struct.calcsize(f"<{codes}") == sum(sizes)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)
def test_parameters_have_unique_names_and_matching_types(
    spec: type[KernelSpec],
) -> None:
    """Each field name is unique, and its CUDA type has the size of its format."""
    parameters = spec.parameters
    expected = {"128s": "TensorMap", "Q": "*", "q": "i64", "i": "int", "f": "float"}

    assert len({parameter.name for parameter in parameters}) == len(parameters)
    assert all(parameter.cuda_type.endswith(expected[parameter.code]) for parameter in parameters)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)
def test_parameters_fit_the_launch_limit(spec: type[KernelSpec]) -> None:
    """CUDA passes at most 4096 bytes."""
    size = struct.calcsize("".join(parameter.code for parameter in spec.parameters))

    assert size <= 4096


@pytest.mark.parametrize(
    ("spec", "packing"),
    [(COMBINE, "<QQQQQQ16sfff"), (mla_sm90(), "<384sQQQQQQQQQQQQQQQ104sfff")],
    ids=["combine", "tensor maps"],
)
def test_constant_parameters_pack_as_one_value(spec: KernelSpec, packing: str) -> None:
    """Tensor maps are one value of a launch and integers another; the bytes are the same."""
    assert packing_of(spec).format == packing
    codes = "".join(parameter.code for parameter in spec.parameters)
    assert packing_of(spec).size == struct.calcsize(f"<{codes}")


def test_scalars_are_packed_by_name_in_order() -> None:
    """Values of other fields are ignored, and a missing value is an error."""
    values = {"num_splits": 3, "heads": 2, "total_rows": 1, "of another kernel": 4}

    assert pack_scalars(COMBINE, values) == struct.pack("<qii", 1, 2, 3)
    with pytest.raises(KeyError):
        pack_scalars(COMBINE, {"heads": 2, "num_splits": 3})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 2**31}, "heads: expected an int of 32 bits, got 2147483648"),
        ({"total_rows": 2**63}, "total_rows: expected an int of 64 bits, got 9223372036854775808"),
    ],
    ids=["4 bytes", "8 bytes"],
)
def test_an_integer_overflow_is_rejected(change: dict[str, int], message: str) -> None:
    """Expanded views of one element may have shapes that overflow a parameter."""
    values = {"num_splits": 3, "heads": 2, "total_rows": 1}

    with pytest.raises(ArgumentError) as caught:
        pack_scalars(COMBINE, values | change)

    assert str(caught.value) == message


@pytest.mark.parametrize(
    "spec", [mla_sm80(), mla_sm90(), gqa_sm80(), COMBINE], ids=lambda spec: spec.family
)
def test_key_fields_are_all_fields_as_text(spec: KernelSpec) -> None:
    """Every field is in the key, and none as a repr."""
    key_fields = spec.key_fields()

    named: list[str] = []
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name == "variant":
            named += [part.name for part in fields(value)]
        else:
            named += getattr(value, "_fields", (field.name,))
    assert list(key_fields) == named
    assert not any("<" in text or "(" in text for text in key_fields.values())


def test_str_of_a_spec_is_its_family_and_fields() -> None:
    """The text of a spec lists its family and its key fields."""
    spec = CombineSpec(arch=Arch(90, "a"), dtype=DType.FP16, head_dim_vo=256)

    assert str(spec) == "combine(arch=sm_90a, dtype=fp16, head_dim_vo=256)"


def test_a_spec_is_immutable() -> None:
    """A spec is a cache key, so assignment fails."""
    spec = mla_sm80()

    with pytest.raises(FrozenInstanceError):
        spec.tile = spec.tile  # type: ignore[misc]
