"""What every kernel spec has in common."""

from __future__ import annotations

import struct
from dataclasses import FrozenInstanceError, fields, replace
from itertools import permutations
from typing import Any

import pytest

from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.combine import CombineSpec, combine_specs
from mlagen.spec.dtype import EXTRA_ROW_FORMATS, ROW_FORMATS, DType, row_dtype_of
from mlagen.spec.families import specs_of
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.rows import RowFormat
from tests.kernels import COMBINE, gqa_sm80, gqa_sm90, mla_sm80, mla_sm90

SPECS = [mla_sm80(), mla_sm90(), gqa_sm80(), gqa_sm90(), COMBINE]
TYPES = {"128s": "TensorMap", "Q": "*", "q": "i64", "i": "int", "I": "u32", "f": "float"}
SIZES = {"128s": 128, "Q": 8, "q": 8, "i": 4, "I": 4, "f": 4}
specs = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)


@specs
def test_parameters_are_packed_without_padding(spec: KernelSpec) -> None:
    """Names are unique, types match formats, larger fields come first, and CUDA's limit holds."""
    parameters = spec.parameters
    sizes = [SIZES[parameter.code] for parameter in parameters]
    codes = "".join(parameter.code for parameter in parameters)

    assert sizes == sorted(sizes, reverse=True)
    assert struct.calcsize(f"@{codes}") == struct.calcsize(f"<{codes}") == sum(sizes) <= 4096
    assert len({parameter.name for parameter in parameters}) == len(parameters)
    assert all(parameter.cuda_type.endswith(TYPES[parameter.code]) for parameter in parameters)


@specs
def test_key_fields_are_all_fields_as_text(spec: KernelSpec) -> None:
    """Every field is in the key, none as a repr, and none can be assigned."""
    named: list[str] = []
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name == "variant":
            named += [part.name for part in fields(value)]
        else:
            named += getattr(value, "_fields", (field.name,))
    assert list(spec.key_fields()) == named
    assert not any("<" in text or "(" in text for text in spec.key_fields().values())
    with pytest.raises(FrozenInstanceError):
        spec.arch = spec.arch  # type: ignore[misc]


def test_str_of_a_spec_is_its_family_and_fields() -> None:
    """The text of a spec lists its family and its key fields."""
    spec = CombineSpec(arch=Arch(90, "a"), dtype=DType.FP16, head_dim_vo=256)

    assert str(spec) == (
        "combine(arch=sm_90a, dtype=fp16, head_dim_vo=256, batch_invariant=False, "
        "has_output_gate=False)"
    )


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_every_decode_output_has_one_combine_kernel(arch: Arch) -> None:
    """Each output dtype and width has one, whose slices are at most 128 elements of a row."""
    decode: list[Any] = specs_of(arch, ["mla_sm80", "gqa_sm80"])
    needed = {(spec.out_dtype, spec.head_dim_vo) for spec in decode}

    listed = list(combine_specs(arch))

    assert len(listed) == len(needed)
    assert {(spec.dtype, spec.head_dim_vo) for spec in listed} == needed
    for spec in listed:
        assert (spec.slices - 1) * 128 < spec.head_dim_vo <= spec.slices * 128
        assert (spec.threads, spec.shared_bytes) == (128, 0)


@pytest.mark.parametrize(
    ("dtype", "cuda_name", "elements", "size"),
    [
        (DType.BF16, "Bf16", 576, 1152),
        (DType.FP16, "Fp16", 128, 256),
        (DType.E4M3, "E4m3", 576, 576),
        (DType.INT8, "Int8", 128, 128),
        (DType.NVFP4, "Nvfp4", 128, 64),
        (DType.FP8_DS_MLA, "E4m3", 576, 656),
        (DType.FP8_DS_MLA, "E4m3", 512, 528),
        (DType.FP8_PER_TOKEN, "E4m3", 576, 640),
        (DType.FP8_DSV4, "E4m3", 512, 584),
        (DType.FP8_DSV41, "E4m3", 512, 528),
        (DType.FP8_DSV41_INLINE, "E4m3", 512, 528),
    ],
    ids=str,
)
def test_rows_and_tags_of_a_dtype(dtype: DType, cuda_name: str, elements: int, size: int) -> None:
    """A row has the size of its parts; tags are types, of a packed row that of its latent part."""
    assert (dtype.cuda_name, dtype.row_bytes(elements)) == (cuda_name, size)


# The fields of a format whose rows are distinct from every other's: 672 bytes, always with rope.
_DISTINCT: dict[str, Any] = {"group": 64, "bf16_elements": (64,)}


@pytest.mark.parametrize(
    ("width", "rope", "is_other"),
    [(656, 64, 0), (528, 0, 0), (544, 0, 0), (672, 0, 0), (1, 64, 0), (640, 64, 0), (672, 64, 1)],
)
def test_bytes_are_rows_of_deepseek_unless_another_format_has_their_width(
    width: int, rope: int, is_other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A format that a call names is never that of a width, and padded rows stay what they are."""
    assert row_dtype_of(width, 512 + rope) is DType.FP8_DS_MLA

    other = replace(ROW_FORMATS[DType.FP8_DS_MLA], **_DISTINCT)
    monkeypatch.setitem(ROW_FORMATS, DType.INT8, other)

    assert row_dtype_of(width, 512 + rope) is (DType.INT8 if is_other else DType.FP8_DS_MLA)


def test_a_width_has_one_format() -> None:
    """Rows of a format whose name no call gives are never those of another, padded or not."""
    unnamed = [row for row in ROW_FORMATS.values() if not row.is_named]
    for row, other in permutations(unnamed, 2):
        for elements in (row.scaled_elements + rest for rest in row.bf16_elements):
            width = max(row.row_bytes(elements), other.row_bytes(elements))
            assert not (row.fits(width, elements) and other.fits(width, elements))


@pytest.mark.parametrize(
    "row", dict.fromkeys((*ROW_FORMATS.values(), *EXTRA_ROW_FORMATS.values())), ids=str
)
def test_kernels_can_copy_the_rows_of_a_format(row: RowFormat) -> None:
    """They copy chunks of 16 bytes with one scale, and a rope part of 128 bytes or none."""
    assert row.group % 16 == row.scaled_elements % row.group == row.bf16_offset % 16 == 0
    assert row.group == row.scaled_elements or not row.scales_bf16
    assert {64, 0}.issuperset(row.bf16_elements)
    assert row.bf16_elements
