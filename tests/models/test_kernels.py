"""The kernels of models: those that their calls take, whatever the number of GPUs."""

from __future__ import annotations

import pytest

from mlagen.errors import ArgumentError
from mlagen.models.config import GqaModel, MlaModel, find_model, preset_names
from mlagen.models.heads import GqaHeads
from mlagen.models.kernels import Use, model_specs
from mlagen.spec.arch import ARCHS, parse_arch
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import KernelSpec
from tests.kernels import (
    SM_80,
    SM_90A,
    gqa_sm80,
    gqa_sm90,
    mla_sm80,
    mla_sm90,
    mla_sm90_fp8,
    mla_sm90_fp8kv,
)

E4M3, FP8_DS_MLA, FP8_PER_TOKEN = DType.E4M3, DType.FP8_DS_MLA, DType.FP8_PER_TOKEN
V3, V32, LLAMA = find_model("deepseek-v3"), find_model("deepseek-v3.2"), find_model("llama-3-8b")


def combine(arch: str, dim: int, dtype: DType = DType.BF16) -> CombineSpec:
    """Return a combining kernel."""
    return CombineSpec(arch=parse_arch(arch), dtype=dtype, head_dim_vo=dim)


def values(specs: list[KernelSpec], name: str) -> set[str]:
    """Return the values of an ingredient."""
    return {spec.key_fields()[name] for spec in specs if name in spec.key_fields()}


def test_latent_attention_on_hopper_takes_either_kernel() -> None:
    """The 128 heads of one GPU and the 16 of eight take the widest and the narrowest tile."""
    specs = model_specs(SM_90A, V3, Use(tp=(1, 8)))

    assert specs == [
        mla_sm90(rows=128),
        mla_sm90(rows=16),
        mla_sm80(rows=128),
        combine("sm_90a", 512),
        mla_sm80(rows=16),
    ]


def test_latent_attention_elsewhere_takes_the_portable_kernel() -> None:
    """With the one that combines its splits."""
    specs = model_specs(SM_80, V3, Use(tp=(8,)))

    assert specs == [mla_sm80(arch=SM_80), combine("sm_80", 512)]


def test_a_cache_in_e4m3_is_read_by_queries_of_both_kinds() -> None:
    """Servers quantise the query or leave it."""
    specs = model_specs(SM_90A, V3, Use(tp=(8,), kv_dtypes=(E4M3,)))

    assert specs == [
        mla_sm90_fp8kv(kv_dtype=E4M3, lookup="paged", rows=16),
        mla_sm80(kv_dtype=E4M3),
        combine("sm_90a", 512),
        mla_sm90_fp8(),
        mla_sm90_fp8kv(query_dtype=E4M3, kv_dtype=E4M3, lookup="paged", rows=16),
        mla_sm80(query_dtype=E4M3, kv_dtype=E4M3),
    ]


@pytest.mark.parametrize(
    ("kv_dtype", "query_dtype"),
    [(FP8_DS_MLA, "bf16"), (FP8_PER_TOKEN, "fp8_per_token")],
    ids=["scales in the row", "scales apart"],
)
def test_packed_rows_have_queries_of_one_kind(kv_dtype: DType, query_dtype: str) -> None:
    """Those that a call with such a cache has."""
    specs = model_specs(SM_90A, V3, Use(kv_dtypes=(kv_dtype,)))

    assert values(specs, "query_dtype") == {query_dtype}
    assert values(specs, "kv_dtype") == {str(kv_dtype)}


def test_a_model_that_chooses_tokens_also_reads_all() -> None:
    """Short sequences are read whole, and long ones by list."""
    specs = model_specs(SM_90A, V32, Use(tp=(8,)))

    assert specs == [
        mla_sm90(),
        mla_sm80(),
        combine("sm_90a", 512),
        mla_sm80(lookup="sparse"),
    ]


def test_lists_of_tokens_are_a_request_for_each_query_token() -> None:
    """However many query tokens there are, the rows are the heads."""
    specs = model_specs(SM_80, V32, Use(tp=(8,), q_lens=(1, 4), lookups=("sparse",)))

    assert specs == [mla_sm80(arch=SM_80, lookup="sparse"), combine("sm_80", 512)]


def test_lists_of_tokens_are_left_out_where_no_kernel_takes_them() -> None:
    """A layout of the cache that knows none is not rejected for it."""
    specs = model_specs(SM_80, V32, Use(kv_dtypes=(FP8_PER_TOKEN,)))

    assert values(specs, "lookup") == {"paged"}


def test_grouped_queries_take_their_kernel_for_the_usual_pages() -> None:
    """Of 16 and of 64 tokens."""
    specs = model_specs(SM_90A, LLAMA, Use(tp=(1, 2)))

    assert specs == [
        gqa_sm90(page_size=16),
        gqa_sm80(page_size=16),
        combine("sm_90a", 128),
        gqa_sm90(page_size=64),
        gqa_sm80(page_size=64),
    ]


def test_what_is_said_takes_the_place_of_the_usual() -> None:
    """Any page size, also one that no table has."""
    use = Use(page_sizes=(48,), dtypes=(DType.FP16,), q_lens=(8,))

    specs = model_specs(SM_80, LLAMA, use)

    fp16 = DType.FP16
    expected = gqa_sm80(
        arch=SM_80, rows=32, query_dtype=fp16, kv_dtype=fp16, out_dtype=fp16, page_size=48
    )
    assert specs == [expected, combine("sm_80", 128, fp16)]


@pytest.mark.parametrize(("tp", "rows"), [(1, 8), (8, 8), (16, 4), (64, 1)], ids=str)
def test_kv_heads_are_repeated_where_there_are_fewer_than_gpus(tp: int, rows: int) -> None:
    """So that a GPU has one at least, and its query heads are fewer."""
    model = GqaModel(name="m", dtype=DType.BF16, heads=64, kv_heads=8, head_dim=128)

    specs = model_specs(SM_90A, model, Use(tp=(tp,), q_lens=(3,), page_sizes=(64,)))

    assert specs[:2] == [gqa_sm90(rows=rows * 3), gqa_sm80(rows=rows * 3)]


@pytest.mark.parametrize(
    ("model", "use", "message"),
    [
        (
            V3,
            Use(tp=(3,)),
            "deepseek-v3: tp: expected a divisor of num_attention_heads 128, got 3",
        ),
        (
            GqaModel(name="m", dtype=DType.BF16, heads=48, kv_heads=8, head_dim=128),
            Use(tp=(6,)),
            "m: tp: expected a divisor of num_key_value_heads 8, got 6",
        ),
        (
            LLAMA,
            Use(kv_dtypes=(FP8_DS_MLA,)),
            "llama-3-8b: no GQA decode kernel for query bf16, cache fp8_ds_mla, output bf16; ",
        ),
        (
            V3,
            Use(kv_dtypes=(DType.INT8,)),
            "deepseek-v3: no MLA decode kernel for query bf16, cache int8; supported: ",
        ),
    ],
    ids=["heads", "kv heads", "cache of GQA", "cache of MLA"],
)
def test_what_no_kernel_serves_says_the_model(
    model: MlaModel | GqaModel, use: Use, message: str
) -> None:
    """With what is wrong and what would do."""
    with pytest.raises(ArgumentError) as caught:
        model_specs(SM_90A, model, use)

    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_kernels_everywhere(name: str) -> None:
    """On every architecture, one that decodes and one that combines, each kernel once."""
    model = find_model(name)

    for arch in ARCHS:
        specs = model_specs(arch, model, Use(tp=(1, 4), q_lens=(1, 2)))

        families = {spec.family for spec in specs}
        assert len(specs) == len(set(specs))
        assert "combine" in families
        assert families & {"mla_sm80", "gqa_sm80"}
        is_latent = isinstance(model, MlaModel) and model.qk_rope_head_dim > 0
        assert ("mla_sm90" in families) == (is_latent and arch.has_wgmma)


@pytest.mark.parametrize(
    ("model", "kv_dtypes", "missing"),
    [
        ("glm-5.3-flash", (E4M3,), "no MLA decode kernel for query e4m3, cache e4m3, "),
        ("glm-5.3-flash", (DType.BF16, E4M3), "no MLA decode kernel for query e4m3, cache e4m3, "),
        (
            "deepseek-v3",
            (DType.BF16, DType.INT8),
            "no MLA decode kernel for query bf16, cache int8",
        ),
        (
            "llama-3-8b",
            (DType.BF16, FP8_DS_MLA),
            "no GQA decode kernel for query bf16, cache fp8_ds_mla",
        ),
    ],
)
def test_a_pair_of_dtypes_without_a_kernel_is_left_out(
    model: str, kv_dtypes: tuple[DType, ...], missing: str
) -> None:
    """The other pairs are served as if it had not been asked for, and a sentence names it."""
    left_out: list[str] = []

    specs = model_specs(SM_90A, find_model(model), Use(kv_dtypes=kv_dtypes), left_out.append)

    assert len(left_out) == 1 or model == "glm-5.3-flash"
    assert all(sentence.startswith(f"{model}: {missing}") for sentence in left_out)
    assert specs
    assert values(specs, "query_dtype") == {"bf16"}


def test_every_kind_of_head_has_its_kernels() -> None:
    """Layers with other heads take kernels of their own."""
    model = GqaModel(
        name="m",
        dtype=DType.BF16,
        heads=8,
        kv_heads=4,
        head_dim=256,
        others=(GqaHeads(8, 2, 512),),
    )

    specs = model_specs(SM_90A, model, Use())

    assert values(specs, "head_dim") == {"256", "512"}


def test_layers_without_a_kernel_are_named() -> None:
    """What a model says of itself comes with its kernels."""
    model = GqaModel(
        name="m", dtype=DType.BF16, heads=8, kv_heads=4, head_dim=64, left_out=("m: mamba",)
    )
    left_out: list[str] = []

    model_specs(SM_90A, model, Use(), left_out.append)

    assert left_out == ["m: mamba"]
