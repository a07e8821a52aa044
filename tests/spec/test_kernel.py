"""What every family's spec keeps to."""

from __future__ import annotations

import struct
from dataclasses import FrozenInstanceError, fields

import pytest

from mlagen.errors import ArgumentError
from mlagen.spec.arch import Arch
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
from mlagen.spec.gqa import GqaSm80Spec
from mlagen.spec.kernel import KernelSpec, pack_scalars, packing_of
from mlagen.spec.mla import MlaSm80Spec
from mlagen.spec.mla_sm90 import MlaSm90Spec
from tests.kernels import COMBINE, gqa_sm80, mla_sm80, mla_sm90

SPECS = (MlaSm80Spec, MlaSm90Spec, GqaSm80Spec, CombineSpec)
SIZES = {"128s": 128, "Q": 8, "q": 8, "i": 4, "f": 4}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)
def test_parameters_have_no_padding(spec: type[KernelSpec]) -> None:
    """The larger come first, so native alignment adds nothing inside the struct."""
    sizes = [SIZES[parameter.code] for parameter in spec.parameters]
    codes = "".join(parameter.code for parameter in spec.parameters)

    assert sizes == sorted(sizes, reverse=True)
    assert struct.calcsize(f"@{codes}") == struct.calcsize(f"<{codes}") == sum(sizes)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)
def test_parameters_have_names_of_their_own_and_types_of_their_size(
    spec: type[KernelSpec],
) -> None:
    """Each field is named once, and its CUDA type is what its format packs."""
    parameters = spec.parameters
    expected = {"128s": "TensorMap", "Q": "*", "q": "i64", "i": "int", "f": "float"}

    assert len({parameter.name for parameter in parameters}) == len(parameters)
    assert all(parameter.cuda_type.endswith(expected[parameter.code]) for parameter in parameters)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)
def test_parameters_fit_a_launch(spec: type[KernelSpec]) -> None:
    """CUDA passes 4096 bytes at the most."""
    size = struct.calcsize("".join(parameter.code for parameter in spec.parameters))

    assert size <= 4096


@pytest.mark.parametrize(
    ("spec", "packing"),
    [(COMBINE, "<QQQQQQ16sfff"), (mla_sm90(), "<384sQQQQQQQQQQQQQQQ104sfff")],
    ids=["combining", "with tensor maps"],
)
def test_what_does_not_change_is_packed_as_one(spec: KernelSpec, packing: str) -> None:
    """Tensor maps are one value of a launch, and integers are one; the bytes are the same."""
    assert packing_of(spec).format == packing
    codes = "".join(parameter.code for parameter in spec.parameters)
    assert packing_of(spec).size == struct.calcsize(f"<{codes}")


def test_integers_are_packed_by_name_in_their_order() -> None:
    """Values of other fields are left out, and one that is missing is an error."""
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
def test_an_integer_that_does_not_fit_is_rejected(change: dict[str, int], message: str) -> None:
    """Views of one element may have shapes that no field of a kernel holds."""
    values = {"num_splits": 3, "heads": 2, "total_rows": 1}

    with pytest.raises(ArgumentError) as caught:
        pack_scalars(COMBINE, values | change)

    assert str(caught.value) == message


@pytest.mark.parametrize(
    "spec", [mla_sm80(), mla_sm90(), gqa_sm80(), COMBINE], ids=lambda spec: spec.family
)
def test_ingredients_are_all_fields_as_text(spec: KernelSpec) -> None:
    """No field that changes the code is missing from the key, and none reads like a repr."""
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


def test_a_spec_reads_as_its_family_and_fields() -> None:
    """Logs name a kernel so that a person can tell it from another."""
    spec = CombineSpec(arch=Arch(90, "a"), dtype=DType.FP16, head_dim_vo=256)

    assert str(spec) == "combine(arch=sm_90a, dtype=fp16, head_dim_vo=256)"


def test_a_spec_cannot_be_changed() -> None:
    """A spec is the key of memos, so it stays what it was."""
    spec = mla_sm80()

    with pytest.raises(FrozenInstanceError):
        spec.tile = spec.tile  # type: ignore[misc]
