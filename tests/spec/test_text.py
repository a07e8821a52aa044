"""Kernels by their text: written by ``str``, read back, and refused with the rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.errors import ArgumentError
from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.combine import CombineSplitsSpec
from mlagen.spec.dtype import DType
from mlagen.spec.families import FAMILIES, specs_of
from mlagen.spec.gqa import SUPPORTED as GQA_SUPPORTED
from mlagen.spec.gqa import GqaSupport, GqaVariant, gqa_decode_spec
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla import mla_decode_spec
from mlagen.spec.mla_hopper import mla_hopper_spec
from mlagen.spec.mla_support import SUPPORTED, MlaVariant
from mlagen.spec.text import parse_spec
from tests.kernels import COMBINE, SM_90A, gqa_decode, mla_decode, mla_hopper


@pytest.mark.parametrize("arch", ARCHS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_is_read_back_from_its_text(arch: Arch, family: str) -> None:
    """The text of a kernel that prewarming knows names that kernel and no other."""
    specs = specs_of(arch, (family,))

    assert [parse_spec(str(spec)) for spec in specs] == specs


archs = st.sampled_from(ARCHS)
counts = st.integers(1, 300)
page_sizes = st.integers(1, 2**31 - 1)


@settings(deadline=None)
@given(archs, st.sampled_from([v for row in SUPPORTED for v in row.variants()]), page_sizes, counts)
def test_an_mla_kernel_of_any_page_size_is_read_back(
    arch: Arch, variant: MlaVariant, page_size: int, rows: int
) -> None:
    """Sizes that prewarming does not know are compiled by calls, and have a text too."""
    variant = replace(variant, page_size=page_size)
    made = [mla_decode_spec(arch, variant, rows), mla_hopper_spec(arch, variant, rows)]
    specs = [spec for spec in made if spec is not None]

    assert [parse_spec(str(spec)) for spec in specs] == specs


@settings(deadline=None)
@given(
    archs,
    st.sampled_from([(row, out) for row in GQA_SUPPORTED for out in row.out_dtypes]),
    st.sampled_from([*range(16, 257, 16), 512]),
    page_sizes,
    counts,
)
def test_a_gqa_kernel_of_any_size_is_read_back(
    arch: Arch, types: tuple[GqaSupport, DType], head_dim: int, page_size: int, rows: int
) -> None:
    """Head dims too, and the kernel that combines its splits."""
    row, out_dtype = types
    variant = GqaVariant(
        query_dtype=row.query_dtype,
        kv_dtype=row.kv_dtype,
        out_dtype=out_dtype,
        head_dim=head_dim,
        page_size=page_size,
    )
    spec = gqa_decode_spec(arch, variant, rows)
    combining = CombineSplitsSpec(arch=arch, dtype=out_dtype, head_dim_vo=head_dim)

    assert parse_spec(str(spec)) == spec
    assert parse_spec(str(combining)) == combining


@pytest.mark.parametrize(
    "text",
    [
        "combine_splits(arch=sm_80, dtype=bf16, head_dim_vo=512)",
        "combine_splits(arch=sm_80,dtype=bf16,head_dim_vo=512)",
        " combine_splits ( dtype = bf16, head_dim_vo = 512, arch = sm_80 ) ",
    ],
    ids=["as it is written", "without blanks", "in another order"],
)
def test_blanks_and_order_do_not_count(text: str) -> None:
    """What a shell or a hand did to the text does not matter."""
    assert parse_spec(text) == COMBINE


def test_the_suffix_of_an_architecture_may_be_left_out() -> None:
    """As everywhere else."""
    assert parse_spec(str(mla_hopper()).replace("sm_90a", "sm_90")) == mla_hopper()


def text_with(spec: KernelSpec, **changes: str) -> str:
    """Return the text of a kernel with some values changed."""
    values = spec.ingredients() | changes
    return f"{spec.family}({', '.join(f'{name}={value}' for name, value in values.items())})"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "kernel: expected family(name=value, ...), got ''"),
        ("combine_splits", "kernel: expected family(name=value, ...), got 'combine_splits'"),
        (
            "combine_splits(arch=sm_80))",
            "kernel: expected family(name=value, ...), got 'combine_splits(arch=sm_80))'",
        ),
        (
            "combine(arch=sm_80)",
            (
                "kernel: expected a family out of mla_decode, mla_hopper, mla_hopper_e4m3, "
                "mla_hopper_packed, gqa_decode, gqa_hopper, combine_splits, got 'combine'"
            ),
        ),
        (
            "combine_splits()",
            "combine_splits: expected arch, dtype, head_dim_vo too, got ''",
        ),
        (
            "combine_splits(arch=sm_80, dtype=bf16)",
            "combine_splits: expected head_dim_vo too, got 'arch=sm_80, dtype=bf16'",
        ),
        (
            "combine_splits(arch=sm_80, page=1)",
            (
                "combine_splits: expected name=value with a name out of arch, dtype, head_dim_vo, "
                "got 'page=1'"
            ),
        ),
        (
            "combine_splits(arch=sm_80, dtype)",
            (
                "combine_splits: expected name=value with a name out of arch, dtype, head_dim_vo, "
                "got 'dtype'"
            ),
        ),
        (
            "combine_splits(arch=sm_80,, dtype=bf16)",
            (
                "combine_splits: expected name=value with a name out of arch, dtype, head_dim_vo, "
                "got ''"
            ),
        ),
        (
            "combine_splits(arch=sm_80, arch=sm_80)",
            "combine_splits: expected arch once, got it twice",
        ),
        (
            text_with(COMBINE, dtype="BF16"),
            (
                "combine_splits.dtype: expected one of bf16, fp16, e4m3, int8, nvfp4, packed656, "
                "packed640, got 'BF16'"
            ),
        ),
    ],
    ids=[
        "nothing",
        "no brackets",
        "brackets that do not match",
        "family",
        "no values",
        "a value is missing",
        "a name of another family",
        "no equals sign",
        "an empty item",
        "a name twice",
        "dtype",
    ],
)
def test_what_is_no_kernel_is_refused_with_the_rule(text: str, message: str) -> None:
    """The message has what was expected and what was found."""
    with pytest.raises(ArgumentError) as caught:
        parse_spec(text)

    assert str(caught.value) == message


@pytest.mark.parametrize(
    "number", ["-1", "+64", "6_4", "064", "64.0", "\u0666\u0664", "", str(2**31)]
)
def test_a_number_is_written_in_one_way(number: str) -> None:
    """Else two texts would name one kernel, or a compiler would be given what it cannot hold."""
    rule = rf"^mla_decode.page_size: expected a whole number up to {2**31 - 1}, got "

    with pytest.raises(ArgumentError, match=rule):
        parse_spec(text_with(mla_decode(), page_size=number))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (text_with(COMBINE, arch="sm_70"), "arch: expected one of sm_80, "),
        (text_with(mla_decode(), page_size="0"), "mla_decode.page_size: expected 1 or more, got 0"),
        (
            text_with(gqa_decode(), head_dim="72"),
            "gqa_decode: no GQA decode kernel for head_dim 72",
        ),
        (
            text_with(mla_decode(), kv_lora_rank="128"),
            "mla_decode: no MLA decode kernel for query bf16, cache bf16, ",
        ),
        (text_with(mla_decode(), lookup="../x"), "mla_decode: no MLA decode kernel for query bf16"),
        (text_with(mla_decode(), kv_dtype="int8"), "mla_decode: no MLA decode kernel for query "),
        (
            text_with(mla_decode(), tile_tokens="48"),
            f"mla_decode: expected what a call takes, the nearest {mla_decode()}, got mla_decode(",
        ),
        (
            text_with(mla_hopper(), tile_rows="48"),
            "mla_hopper: expected what a call takes, the nearest mla_hopper(",
        ),
        (
            text_with(mla_hopper(), arch="sm_80"),
            "mla_hopper: expected what a call takes, got mla_hopper(arch=sm_80, ",
        ),
        (
            text_with(gqa_decode(), warps="0"),
            f"gqa_decode: expected what a call takes, the nearest {gqa_decode()}, got gqa_decode(",
        ),
        (
            text_with(COMBINE, head_dim_vo="72"),
            "combine_splits: no GQA decode kernel for head_dim 72; supported: ",
        ),
        (
            text_with(COMBINE, dtype="int8"),
            f"combine_splits: expected what a call takes, the nearest {COMBINE}, got ",
        ),
    ],
    ids=[
        "architecture",
        "no tokens in a page",
        "head dim",
        "rank",
        "lookup",
        "dtype of the cache",
        "tile",
        "tile on Hopper",
        "Hopper elsewhere",
        "tile of GQA",
        "head dim to combine",
        "dtype to combine",
    ],
)
def test_a_kernel_that_no_call_takes_is_refused(text: str, message: str) -> None:
    """Nothing reaches the compiler that no call would have sent there."""
    with pytest.raises(ArgumentError) as caught:
        parse_spec(text)

    assert str(caught.value).startswith(message)


@settings(deadline=None)
@given(st.text())
def test_any_other_text_is_an_argument_error(text: str) -> None:
    """Whatever a file holds, no other exception comes of it."""
    with pytest.raises(ArgumentError):
        parse_spec(text)


@settings(deadline=None)
@given(st.sampled_from([mla_decode(), mla_hopper(), gqa_decode(), COMBINE]), st.data())
def test_a_changed_value_is_another_kernel_or_an_argument_error(
    spec: KernelSpec, data: st.DataObject
) -> None:
    """What is read is what the text says, whatever value stands there."""
    name = data.draw(st.sampled_from(list(spec.ingredients())))
    value = data.draw(st.one_of(st.integers(-1, 600).map(str), st.sampled_from(["e4m3", "sm_80"])))
    text = text_with(spec, **{name: value})

    try:
        read = parse_spec(text)
    except ArgumentError:
        return
    assert str(read) == text


def test_the_kernels_of_one_architecture_have_texts_of_their_own() -> None:
    """No two kernels share a text."""
    specs = specs_of(SM_90A)

    assert len({str(spec) for spec in specs}) == len(specs)
