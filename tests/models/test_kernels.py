"""The kernels of models, for any tensor-parallel size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlagen.errors import ArgumentError
from mlagen.models.config import GqaModel, MlaModel, find_model
from mlagen.models.kernels import (
    PAGE_SIZES,
    ServingOptions,
    model_specs,
    page_size_of,
    page_size_text,
    served_page_sizes,
)
from mlagen.models.layers import GqaHeads
from mlagen.spec.arch import Arch, parse_arch
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
from mlagen.spec.families import mla_call_specs
from mlagen.spec.gqa.variant import PAGE_SIZES as GQA_PAGE_SIZES
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla.variant import PAGE_SIZES as MLA_PAGE_SIZES
from mlagen.spec.mla.variant import MlaVariant
from tests.kernels import (
    SM_80,
    SM_90A,
    gqa_sm80,
    gqa_sm90,
    mla_sm80,
    mla_sm90,
    mla_sm90_fp8,
    mla_sm90_fp8kv,
    write_rows,
)

E4M3, FP8_DS_MLA, FP8_PER_TOKEN = DType.E4M3, DType.FP8_DS_MLA, DType.FP8_PER_TOKEN
V4 = find_model("deepseek-v4-flash")
V3, V32, LLAMA = find_model("deepseek-v3"), find_model("deepseek-v3.2"), find_model("llama-3-8b")


def combine(arch: str, dim: int, dtype: DType = DType.BF16) -> CombineSpec:
    """Return a combining kernel."""
    return CombineSpec(arch=parse_arch(arch), dtype=dtype, head_dim_vo=dim)


def values(specs: list[KernelSpec], name: str) -> set[str]:
    """Return the values of a spec field."""
    return {spec.key_fields()[name] for spec in specs if name in spec.key_fields()}


FP16 = DType.FP16
OF_FP16 = {"query_dtype": FP16, "kv_dtype": FP16, "out_dtype": FP16, "page_size": 48}
COMBINE = combine("sm_90a", 512)
KV_192_128: dict[str, Any] = {"head_dim": 192, "head_dim_vo": 128}


def sparse_specs(rows: int, kv_dtype: DType) -> list[KernelSpec]:
    """Return the kernels of sparse calls with bf16 queries."""
    variant = MlaVariant(query_dtype=DType.BF16, kv_dtype=kv_dtype, lookup="sparse")
    return list(mla_call_specs(SM_90A, variant, rows))


FP8KV: dict[str, Any] = {"kv_dtype": E4M3, "lookup": "paged", "rows": 16}
SPECS: dict[str, tuple[Arch, MlaModel | GqaModel, dict[str, Any], list[KernelSpec]]] = {
    "the heads of one GPU and of eight take the largest and the smallest tile": (
        *(SM_90A, V3, {"tp": (1, 8)}),
        [mla_sm90(rows=128), mla_sm90(), mla_sm80(rows=128), COMBINE, mla_sm80()],
    ),
    "an architecture without wgmma takes the sm80 kernel": (
        *(SM_80, V3, {"tp": (8,)}),
        [mla_sm80(arch=SM_80), combine("sm_80", 512)],
    ),
    "a cache in e4m3 is read by queries of both kinds": (
        *(SM_90A, V3, {"tp": (8,), "kv_dtypes": (E4M3,)}),
        [
            *(mla_sm90_fp8kv(**FP8KV), mla_sm80(kv_dtype=E4M3), COMBINE, mla_sm90_fp8()),
            mla_sm90_fp8kv(query_dtype=E4M3, **FP8KV),
            mla_sm80(query_dtype=E4M3, kv_dtype=E4M3),
        ],
    ),
    "a sparse model has dense kernels for short sequences": (
        *(SM_90A, V32, {"tp": (8,)}),
        [mla_sm90(), mla_sm80(), COMBINE, mla_sm90(lookup="sparse"), mla_sm80(lookup="sparse")],
    ),
    "a model without rope has kernels without it": (
        *(SM_90A, find_model("glm-5.3-flash"), {"tp": (8,), "lookups": ("paged",)}),
        [mla_sm90(qk_rope_head_dim=0), mla_sm80(qk_rope_head_dim=0), COMBINE],
    ),
    "in sparse calls each query token is a sequence": (
        *(SM_80, V32, {"tp": (8,), "q_lens": (1, 4), "lookups": ("sparse",)}),
        [mla_sm80(arch=SM_80, lookup="sparse"), combine("sm_80", 512)],
    ),
    "long sparse prefills over fp8_ds_mla with 64 heads or more take bf16 rows": (
        *(SM_90A, V32, {"tp": (2, 4), "kv_dtypes": (FP8_DS_MLA,), "lookups": ("sparse",)}),
        list(
            dict.fromkeys(
                [
                    *sparse_specs(64, FP8_DS_MLA),
                    *sparse_specs(64, DType.BF16),
                    *sparse_specs(32, FP8_DS_MLA),
                    write_rows(kv_dtype=FP8_DS_MLA, head_dim_qk=576),
                ]
            )
        ),
    ),
    "ranks of decode context parallel gather the heads, and have a mask of all ranks": (
        *(SM_80, V3, {"tp": (8,), "dcp": (8,)}),
        [
            *(mla_sm80(arch=SM_80, rows=128), combine("sm_80", 512)),
            mla_sm80(arch=SM_80, rows=128, mask="dcp"),
        ],
    ),
    "grouped queries have pages of 16 and of 64 tokens": (
        *(SM_90A, LLAMA, {"tp": (1, 2)}),
        [
            *(gqa_sm90(page_size=16), gqa_sm80(page_size=16), combine("sm_90a", 128)),
            *(gqa_sm90(page_size=64), gqa_sm80(page_size=64)),
        ],
    ),
    "blocks of a hybrid model are split into pages of 16, 32 or 64 tokens": (
        *(SM_80, find_model("qwen3.5-27b"), {}),
        [
            *(gqa_sm80(arch=SM_80, head_dim=256, rows=8, page_size=16), combine("sm_80", 256)),
            gqa_sm80(arch=SM_80, head_dim=256, rows=8, page_size=32),
            gqa_sm80(arch=SM_80, head_dim=256, rows=8, page_size=64),
        ],
    ),
    "capped scores have kernels of their own": (
        *(SM_80, find_model("gemma-2-27b"), {"page_sizes": (16,)}),
        [gqa_sm80(arch=SM_80, rows=2, page_size=16, has_soft_cap=True), combine("sm_80", 128)],
    ),
    "layers with other head dims have kernels of their own": (
        *(SM_80, find_model("gemma-4-31b"), {"page_sizes": (16,), "tp": (4,)}),
        [
            *(gqa_sm80(arch=SM_80, head_dim=256, rows=2, page_size=16), combine("sm_80", 256)),
            *(gqa_sm80(arch=SM_80, head_dim=512, rows=8, page_size=16), combine("sm_80", 512)),
        ],
    ),
    "values of fewer dims than keys have kernels of their own": (
        *(SM_90A, find_model("mimo-v2-flash"), {"page_sizes": (64,), "tp": (4,)}),
        [
            *(gqa_sm90(**KV_192_128, rows=16), gqa_sm80(**KV_192_128, rows=16)),
            *(combine("sm_90a", 128), gqa_sm90(**KV_192_128)),
        ],
    ),
    "explicit options replace the defaults": (
        *(SM_80, LLAMA, {"page_sizes": (48,), "dtypes": (FP16,), "q_lens": (8,)}),
        [gqa_sm80(arch=SM_80, rows=32, **OF_FP16), combine("sm_80", 128, FP16)],
    ),
}


@pytest.mark.parametrize(("arch", "model", "use", "specs"), SPECS.values(), ids=SPECS)
def test_kernels_of_a_model(
    arch: Arch, model: MlaModel | GqaModel, use: dict[str, Any], specs: list[KernelSpec]
) -> None:
    """A model has these kernels, in this order."""
    assert model_specs(arch, model, ServingOptions(**use)) == specs


@pytest.mark.parametrize(
    ("kv_dtype", "query_dtype", "lookups"),
    [(FP8_DS_MLA, "bf16", {"paged", "sparse"}), (FP8_PER_TOKEN, "fp8_per_token", {"paged"})],
    ids=["scales in the row", "separate scales"],
)
def test_a_scaled_fp8_cache_has_one_query_dtype(
    kv_dtype: DType, query_dtype: str, lookups: set[str]
) -> None:
    """It is that of its calls; a cache layout without sparse kernels is served dense."""
    specs = model_specs(SM_90A, V32, ServingOptions(tp=(4,), kv_dtypes=(kv_dtype,)))
    assert values(specs, "query_dtype") == {query_dtype}
    assert values(specs, "kv_dtype") == {str(kv_dtype)}
    assert values(specs, "lookup") == lookups


V41 = {"kv_dtypes": (DType.FP8_DSV41, DType.FP8_DSV41_INLINE_FP4_CA)}
OF_V4 = [(DType.FP8_DSV4, "first")]
OF_V41 = [
    (DType.FP8_DSV41, "first"),
    (DType.FP8_DSV41_INLINE, "first"),
    (DType.FP8_DSV41_INLINE_FP4_CA, "extra"),
]


@pytest.mark.parametrize(
    ("name", "use", "heads", "written"),
    [
        ("deepseek-v4-flash", {"tp": (1, 2, 4, 8)}, (64, 32, 16, 8), OF_V4),
        ("deepseek-v4-pro", {"tp": (1, 4, 16), "q_lens": (1, 2)}, (128, 32, 8), OF_V4),
        ("deepseek-v4.1", {"tp": (1, 8), **V41}, (64, 8), OF_V41),
    ],
)
@pytest.mark.parametrize("arch", [SM_80, SM_90A], ids=str)
def test_a_model_of_two_pools_has_its_kernels_for_any_pages(
    name: str,
    use: dict[str, Any],
    heads: tuple[int, ...],
    written: list[tuple[DType, str]],
    arch: Arch,
) -> None:
    """A query token is a sequence; page sizes are arguments; each format of rows has a writer."""
    specs = model_specs(arch, find_model(name), ServingOptions(**use))
    expected = {
        spec: None
        for kv_dtype in use.get("kv_dtypes", (DType.FP8_DSV4,))
        for rows in heads
        for spec in mla_call_specs(
            arch,
            MlaVariant(
                query_dtype=DType.BF16,
                kv_dtype=kv_dtype,
                qk_rope_head_dim=0,
                page_size=0,
                lookup="two_pools",
            ),
            rows,
        )
    }
    writers = [write_rows(arch=arch, kv_dtype=kv_dtype, pool=pool) for kv_dtype, pool in written]
    assert specs == [*expected, *writers]
    assert values(specs, "page_size") == {"0"}


def gqa(heads: int, kv_heads: int, head_dim: int = 128, **facts: Any) -> GqaModel:
    """Return a model with grouped queries."""
    dims: Any = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return GqaModel(name="m", dtype=DType.BF16, **dims, **facts)


@pytest.mark.parametrize(("tp", "rows"), [(1, 8), (8, 8), (16, 4), (64, 1)], ids=str)
def test_kv_heads_are_repeated_where_there_are_fewer_than_gpus(tp: int, rows: int) -> None:
    """With more GPUs than kv heads, each GPU has one kv head and fewer query heads."""
    use = ServingOptions(tp=(tp,), q_lens=(3,), page_sizes=(64,))
    specs = model_specs(SM_90A, gqa(64, 8), use)
    assert specs[:2] == [gqa_sm90(rows=rows * 3), gqa_sm80(rows=rows * 3)]


NO_GQA, NO_MLA = "no GQA decode kernel for query", "no MLA decode kernel for query"


@pytest.mark.parametrize(
    ("model", "use", "message"),
    [
        (V3, {"tp": (3,)}, "tp: expected a divisor of num_attention_heads 128, got 3"),
        (
            replace(V3, heads=512),
            {},
            "heads per GPU: expected 256 or less for MLA kernels, got 512",
        ),
        (V3, {"tp": (8,), "dcp": (3,)}, "dcp: expected a divisor of tp 8, got 3"),
        (gqa(48, 8), {"tp": (8,), "dcp": (2,)}, "dcp: expected 1 for GQA kernels, got 2"),
        (gqa(48, 8), {"tp": (6,)}, "tp: expected a divisor of num_key_value_heads 8, got 6"),
        (LLAMA, {"kv_dtypes": (FP8_DS_MLA,)}, f"{NO_GQA} bf16, cache fp8_ds_mla, output bf16; "),
        (
            V3,
            {"kv_dtypes": (DType.INT8,)},
            f"{NO_MLA} bf16, cache int8; supported with lookup paged: ",
        ),
        (V4, {"page_sizes": (64, 2)}, "page_size: expected none, as its kernels take any, got 64"),
        (V4, {"lookups": ("sparse",)}, f"{NO_MLA} bf16, cache fp8_dsv4, .* \\(two_pools, shared, "),
    ],
    ids=[
        "heads",
        "more heads",
        "ranks",
        "ranks of GQA",
        "kv heads",
        "cache of GQA",
        "cache of MLA",
        "pages of two pools",
        "lookup of two pools",
    ],
)
def test_an_unsupported_use_names_the_model(
    model: MlaModel | GqaModel, use: dict[str, Any], message: str
) -> None:
    """The message has the model, the problem and the supported values."""
    with pytest.raises(ArgumentError, match=f"^{model.name}: {message}"):
        model_specs(SM_90A, model, ServingOptions(**use))


@pytest.mark.parametrize(
    ("model", "kv_dtypes", "missing"),
    [
        ("glm-5.3-flash", (DType.BF16, FP8_DS_MLA), f"{NO_MLA} bf16, cache fp8_ds_mla, "),
        ("deepseek-v3", (DType.BF16, DType.INT8), f"{NO_MLA} bf16, cache int8"),
        ("llama-3-8b", (DType.BF16, FP8_DS_MLA), f"{NO_GQA} bf16, cache fp8_ds_mla"),
    ],
)
def test_a_pair_of_dtypes_without_a_kernel_is_left_out(
    model: str, kv_dtypes: tuple[DType, ...], missing: str
) -> None:
    """The other pairs are served, and a sentence names the omitted one."""
    left_out: list[str] = []
    use = ServingOptions(kv_dtypes=kv_dtypes)
    specs = model_specs(SM_90A, find_model(model), use, left_out.append)
    pairs = [sentence for sentence in left_out if "layers of" not in sentence]
    assert len(pairs) == 1 or model == "glm-5.3-flash"
    assert all(sentence.startswith(f"{model}: {missing}") for sentence in pairs)
    assert values(specs, "query_dtype") == {"bf16"}


def test_layers_with_blocks_of_each_query_token_have_their_own_kernels() -> None:
    """A block is a page of them, and a query token a sequence, whatever the drafts."""
    options = ServingOptions(tp=(4,), q_lens=(1, 4), page_sizes=(64,))
    named = [
        spec.key_fields() for spec in model_specs(SM_90A, gqa(64, 4, sparse_block=128), options)
    ]

    rows = {
        (each["page_size"], each["sparse_block"], each["block_m"])
        for each in named
        if each.get("kv_heads_per_cta")
    }
    assert rows == {("64", "0", "16"), ("64", "0", "32"), ("128", "128", "16")}


def test_layers_of_chosen_tokens_have_pages_of_any_size_that_is_named() -> None:
    """A query token is a sequence, whatever the drafts; a model without an indexer has others."""
    model = find_model("qwen3.8-flash-next")
    options = ServingOptions(tp=(1, 4), q_lens=(1, 4), page_sizes=(1, 1568))
    named = [spec.key_fields() for spec in model_specs(SM_90A, model, options)]

    decode = [each for each in named if "page_size" in each]
    kinds = {(each["page_size"], each["sparse_block"], each["has_output_gate"]) for each in decode}
    assert kinds == {("1", "1", "False"), ("1568", "1", "True")}
    with pytest.raises(ArgumentError, match=r"next: page_size: expected the tokens of a KV block,"):
        model_specs(SM_90A, model, ServingOptions())
    assert page_size_text(model, ServingOptions()) == "any page size"
    assert isinstance(model, GqaModel)
    dense = model_specs(SM_80, replace(model, sparse_block=0), ServingOptions())
    assert values(dense, "sparse_block") == {"0"}


def test_layers_with_other_heads_have_their_own_kernels() -> None:
    """The omitted layers of a model are reported with its kernels."""
    model = gqa(8, 4, 256, others=(GqaHeads(8, 2, 512),), left_out=("m: mamba",))
    left_out: list[str] = []
    specs = model_specs(SM_90A, model, ServingOptions(), left_out.append)
    assert values(specs, "head_dim") == {"256", "512"}
    assert left_out == ["m: mamba"]


@pytest.mark.parametrize(
    ("block_size", "page_size"),
    [(16, 16), (32, 32), (64, 64), (128, 64), (1152, 64), (528, 16), (544, 32), (800, 32), (1, 1)],
)
def test_a_block_is_split_into_the_largest_pages(block_size: int, page_size: int) -> None:
    """An inflated block of a hybrid model has pages of at most 64 tokens, without a remainder."""
    assert page_size_of(block_size) == page_size
    assert block_size % page_size == 0


@pytest.mark.parametrize("is_mla", [False, True])
def test_pages_of_hybrid_models_are_prewarmed(is_mla: bool) -> None:
    """Blocks of hybrid models are multiples of 128 with MLA, and of 16 with GQA."""
    step = 128 if is_mla else 16
    pages = {page_size_of(step * count) for count in range(1, 100)}
    assert pages == set(served_page_sizes(is_mla=is_mla, is_hybrid=True))
    assert set(served_page_sizes(is_mla=is_mla, is_hybrid=False)) <= pages
    assert set(PAGE_SIZES) <= set(MLA_PAGE_SIZES) & set(GQA_PAGE_SIZES)
