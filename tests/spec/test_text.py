"""Tests of the spec parser: round trips of str(spec), and rejected text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.errors import ArgumentError
from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.combine import CombineSpec
from mlagen.spec.families import FAMILIES, specs_of
from mlagen.spec.gqa.sm80 import gqa_sm80_spec
from mlagen.spec.gqa.variant import SUPPORTED as GQA_SUPPORTED
from mlagen.spec.gqa.variant import GqaVariant
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla.sm80 import mla_sm80_spec
from mlagen.spec.mla.sm90 import MlaSm90Spec
from mlagen.spec.mla.variant import SUPPORTED
from mlagen.spec.text import parse_spec
from tests.kernels import COMBINE, gqa_sm80, mla_sm80, mla_sm90


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_every_kernel_parses_back(arch: Arch) -> None:
    """The text of a prewarmed kernel is its own, and parses back to that kernel."""
    texts = {str(spec): spec for spec in specs_of(arch)}

    assert len(texts) == len(specs_of(arch))
    for text, spec in list(texts.items())[::5]:
        assert parse_spec(text) == spec


archs = st.sampled_from(ARCHS)
counts = st.integers(1, 300)
page_sizes = st.integers(1, 2**31 - 1)
head_dims = st.sampled_from([*range(16, 257, 16), 512])
mla_variants = st.builds(
    replace,
    # Kernels over two pools have no page size.
    st.sampled_from([v for row in SUPPORTED for v in row.variants() if v.page_size]),
    page_size=page_sizes,
    batch_invariant=st.booleans(),
)
gqa_variants = st.builds(
    replace,
    st.sampled_from(
        [
            GqaVariant(query_dtype=row.query_dtype, kv_dtype=row.kv_dtype, out_dtype=out_dtype)
            for row in GQA_SUPPORTED
            for out_dtype in row.out_dtypes
        ]
    ),
    head_dim=head_dims,
    page_size=page_sizes,
    has_soft_cap=st.booleans(),
    has_dcp=st.booleans(),
    separate_page_ids=st.booleans(),
    batch_invariant=st.booleans(),
)
sparse_variants = st.builds(
    replace,
    gqa_variants.filter(lambda one: one.out_dtype.is_16bit and not one.has_token_scales),
    has_dcp=st.just(value=False),
    separate_page_ids=st.just(value=False),
    sparse_block=st.sampled_from((1, 16, 128)),
    has_output_gate=st.booleans(),
)
out_dtypes = st.sampled_from([dtype for row in GQA_SUPPORTED for dtype in row.out_dtypes])


@settings(deadline=None, max_examples=200)
@given(
    st.one_of(
        st.builds(mla_sm80_spec, archs, mla_variants, counts),
        st.builds(MlaSm90Spec.of, archs, mla_variants, counts).filter(bool),
        st.builds(gqa_sm80_spec, archs, gqa_variants | sparse_variants, counts),
        st.builds(
            CombineSpec,
            arch=archs,
            dtype=out_dtypes,
            head_dim_vo=head_dims,
            batch_invariant=st.booleans(),
        ),
    )
)
def test_a_kernel_of_any_size_parses_back(spec: KernelSpec) -> None:
    """Page sizes and head dims beyond the prewarmed ones parse back."""
    assert parse_spec(str(spec)) == spec


SPACED = (
    " combine ( has_output_gate = False, batch_invariant = False, dtype = bf16, head_dim_vo = 512, "
    "arch = sm_80 ) "
)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        (
            "combine(arch=sm_80,dtype=bf16,head_dim_vo=512,batch_invariant=False,has_output_gate=False)",
            COMBINE,
        ),
        (
            SPACED,
            COMBINE,
        ),
        (str(mla_sm90()).replace("sm_90a", "sm_90"), mla_sm90()),
    ],
    ids=["no blanks", "another order", "arch without its suffix"],
)
def test_other_spellings_of_a_kernel(text: str, spec: KernelSpec) -> None:
    """Blanks, the order of the names and the suffix of an architecture are free."""
    assert parse_spec(text) == spec


def text_with(spec: KernelSpec, **changes: str) -> str:
    """Return the text of a kernel with some values replaced."""
    values = spec.key_fields() | changes
    return f"{spec.family}({', '.join(f'{name}={value}' for name, value in values.items())})"


FORM = "kernel: expected family(name=value, ...), got "
COMBINE_NAMES = "arch, dtype, head_dim_vo, batch_invariant, has_output_gate"
NAMES = f"combine: expected name=value with a name out of {COMBINE_NAMES}, got "
NUMBER = f"mla_sm80.page_size: expected a whole number up to {2**31 - 1}, got "
UNUSED = "expected a kernel that calls use"
MALFORMED: list[tuple[str, str]] = [
    ("", f"{FORM}''"),
    ("combine", f"{FORM}'combine'"),
    ("combine(arch=sm_80))", f"{FORM}'combine(arch=sm_80))'"),
    ("combine_all(arch=sm_80)", f"kernel: expected a family out of {', '.join(FAMILIES)}, got "),
    ("combine()", f"combine: expected {COMBINE_NAMES} too, got ''"),
    (
        "combine(arch=sm_80, dtype=bf16)",
        "combine: expected head_dim_vo, batch_invariant, has_output_gate too, got 'arch=sm_80",
    ),
    ("combine(arch=sm_80, page=1)", f"{NAMES}'page=1'"),
    ("combine(arch=sm_80, dtype)", f"{NAMES}'dtype'"),
    ("combine(arch=sm_80,, dtype=bf16)", f"{NAMES}''"),
    ("combine(arch=sm_80, arch=sm_80)", "combine: expected arch once, got it twice"),
]
# Changes of a kernel: a number has one spelling, and only kernels that calls use are compiled.
CHANGED: list[tuple[KernelSpec, dict[str, str], str]] = [
    (COMBINE, {"dtype": "BF16"}, "combine.dtype: expected one of bf16, fp16, e4m3, e5m2"),
    *(
        (mla_sm80(), {"page_size": number}, NUMBER)
        for number in ("-1", "+64", "6_4", "064", "64.0", "\u0666\u0664", "", str(2**31))
    ),
    (COMBINE, {"arch": "sm_70"}, "arch: expected one of sm_80, "),
    (mla_sm80(), {"page_size": "0"}, "mla_sm80.page_size: expected 1 or more, got 0"),
    (mla_sm80(), {"kv_lora_rank": "128"}, "mla_sm80: no MLA decode kernel for query bf16, ca"),
    (mla_sm80(), {"lookup": "../x"}, "mla_sm80: no MLA decode kernel for query bf16"),
    (mla_sm80(), {"kv_dtype": "int8"}, "mla_sm80: no MLA decode kernel for query "),
    (mla_sm80(), {"block_n": "48"}, f"mla_sm80: {UNUSED}, the nearest {mla_sm80()}, got mla_"),
    (mla_sm90(), {"block_m": "48"}, f"mla_sm90: {UNUSED}, the nearest mla_sm90("),
    (mla_sm90(), {"arch": "sm_80"}, f"mla_sm90: {UNUSED}, got mla_sm90(arch=sm_80, "),
    (gqa_sm80(), {"head_dim": "72"}, "gqa_sm80: no GQA decode kernel for head_dim 72"),
    (gqa_sm80(), {"has_soft_cap": "yes"}, "gqa_sm80.has_soft_cap: expected True or False, got "),
    (gqa_sm80(), {"warps": "0"}, f"gqa_sm80: {UNUSED}, the nearest {gqa_sm80()}, got gqa_sm8"),
    (COMBINE, {"head_dim_vo": "72"}, f"combine: {UNUSED}, the nearest {COMBINE}, got "),
    (COMBINE, {"dtype": "int8"}, f"combine: {UNUSED}, the nearest {COMBINE}, got "),
    (COMBINE, {"dtype": "e4m3", "has_output_gate": "True"}, f"combine: {UNUSED}, the nearest "),
    (
        gqa_sm80(),
        {"sparse_block": "1", "has_dcp": "True"},
        "gqa_sm80: no sparse GQA decode kernel ",
    ),
]


@pytest.mark.parametrize(
    ("text", "message"),
    [*MALFORMED, *((text_with(spec, **change), message) for spec, change, message in CHANGED)],
)
def test_text_of_no_kernel_is_rejected_with_the_rule(text: str, message: str) -> None:
    """The message has the expected and the given text."""
    with pytest.raises(ArgumentError) as caught:
        parse_spec(text)

    assert str(caught.value).startswith(message)


@settings(deadline=None)
@given(st.text())
def test_any_other_text_is_an_argument_error(text: str) -> None:
    """Arbitrary text raises no other exception."""
    with pytest.raises(ArgumentError):
        parse_spec(text)


@settings(deadline=None)
@given(st.sampled_from([mla_sm80(), mla_sm90(), gqa_sm80(), COMBINE]), st.data())
def test_a_changed_value_is_another_kernel_or_an_argument_error(
    spec: KernelSpec, data: st.DataObject
) -> None:
    """The parsed kernel has the given value, or the text is rejected."""
    name = data.draw(st.sampled_from(list(spec.key_fields())))
    value = data.draw(st.one_of(st.integers(-1, 600).map(str), st.sampled_from(["e4m3", "sm_80"])))
    text = text_with(spec, **{name: value})

    try:
        read = parse_spec(text)
    except ArgumentError:
        return
    assert str(read) == text
