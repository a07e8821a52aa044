"""Kernel selection of a prewarm: by models, by kernel texts, or by spec fields."""

from __future__ import annotations

from typing import Any

import pytest

import mlagen
from mlagen.errors import ArgumentError
from mlagen.models.config import find_model
from mlagen.models.kernels import ServingOptions, model_specs
from mlagen.prewarming.selection import selected_specs
from mlagen.spec.dtype import DType
from mlagen.spec.selection import select_specs
from tests.kernels import COMBINE, SM_80, SM_90A, gqa_sm80, mla_sm80

V3, LLAMA = find_model("deepseek-v3"), find_model("llama-3-8b")


def selected(archs: str = "sm_80", **arguments: Any) -> list[Any]:
    """Return the kernels that these arguments select."""
    wanted = arguments.pop("wanted", {})
    return selected_specs(archs, wanted=wanted, **arguments)


def test_models_are_selected_on_every_architecture() -> None:
    """Each model is selected on each architecture, without duplicates."""
    specs = selected("sm_90a,sm_80", models="deepseek-v3,llama-3-8b", tp=[1, 8], q_len=2)

    use = ServingOptions(tp=(1, 8), q_lens=(2,))
    expected = [
        spec
        for arch in (SM_90A, SM_80)
        for model in (V3, LLAMA)
        for spec in model_specs(arch, model, use)
    ]
    assert specs == list(dict.fromkeys(expected))


def test_serving_options_select_kernels_of_models() -> None:
    """Serving options accept one value or several, like the options of the command."""
    wanted = {"dtype": "fp16", "kv_dtype": ["e4m3"], "page_size": 48, "lookup": "sparse"}

    specs = selected(models=["deepseek-v3.2"], wanted=wanted)

    use = ServingOptions(
        dtypes=(DType.FP16,), kv_dtypes=(DType.E4M3,), page_sizes=(48,), lookups=("sparse",)
    )
    assert specs == model_specs(SM_80, find_model("deepseek-v3.2"), use)


def test_families_filter_the_kernels_of_a_model() -> None:
    """``families`` filters the kernels of a model, for instance to the sm80 kernel."""
    specs = selected("sm_90a", models="deepseek-v3", tp=8, families=["mla_sm80"])

    assert specs == [mla_sm80()]


@pytest.mark.parametrize(
    ("kernels", "specs"),
    [
        (COMBINE, [COMBINE]),
        (str(COMBINE), [COMBINE]),
        ([COMBINE, str(COMBINE)], [COMBINE]),
        ([], []),
    ],
    ids=["a spec", "a text", "several", "none"],
)
def test_a_kernel_is_selected_by_spec_or_by_text(kernels: Any, specs: list[Any]) -> None:
    """Explicit kernels are the whole selection, for any architectures."""
    assert selected("native", kernels=kernels) == specs


def test_kernels_and_models_are_combined() -> None:
    """Kernels and models are combined without duplicates."""
    specs = selected(models="llama-3-8b", kernels=[COMBINE, gqa_sm80(arch=SM_80)])

    rest = [
        spec for spec in model_specs(SM_80, LLAMA, ServingOptions()) if spec != gqa_sm80(arch=SM_80)
    ]
    assert specs == [COMBINE, gqa_sm80(arch=SM_80), *rest]


def test_without_models_and_kernels_supported_kernels_are_filtered() -> None:
    """Without both, the supported kernels are filtered by the other arguments."""
    wanted: dict[str, Any] = {"kv_lora_rank": 512, "dtype": "bf16"}

    assert selected(wanted=wanted, heads=16) == select_specs([SM_80], heads=16, wanted=wanted)


ALONE = "expected none beside kernels, without models, got"
FAMILIES_TEXT = "mla_sm80, mla_sm90, mla_sm90_fp8, mla_sm90_fp8kv, gqa_sm80, gqa_sm90, combine"
KV_DTYPES = "bf16, fp16, e4m3, int8, nvfp4, fp8_ds_mla, fp8_per_token"


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("gpt-5", {}, "model: expected one of deepseek-coder-v2, "),
        ("deepseek-v3", {"tp": 0}, "tp: expected an int, 1 or more, got 0"),
        ("deepseek-v3", {"tp": True}, "tp: expected an int, 1 or more, got True"),
        ("deepseek-v3", {"q_len": [0]}, "q_len: expected an int, 1 or more, got 0"),
        ("deepseek-v3", {"tp": []}, "tp: expected one or more beside models, got none"),
        ("deepseek-v3", {"heads": 16}, "heads: expected none beside models, which define it, got "),
        ("deepseek-v3", {"kv_heads": 16}, "kv_heads: expected none beside models, which define it"),
        ("deepseek-v3", {"wanted": {"mask": "bias"}}, "mask: expected none beside models, got 'bi"),
        ("deepseek-v3", {"wanted": {"page_size": "64"}}, "page_size: expected an int, 1 or more, "),
        (
            "deepseek-v3",
            {"wanted": {"kv_dtype": "fp8"}},
            f"kv_dtype: expected one of {KV_DTYPES}, got 'fp8'",
        ),
        (
            "deepseek-v3",
            {"wanted": {"lookup": "dense"}},
            "lookup: expected one of paged, sparse, got 'dense'",
        ),
        (
            "deepseek-v3",
            {"families": ["mla"]},
            f"family: expected one of {FAMILIES_TEXT}, got 'mla'",
        ),
        (None, {"tp": 8}, "tp: expected none without models, got 8"),
        (None, {"kernels": COMBINE, "families": ["mla_sm80"]}, f"families: {ALONE} ['mla_sm80']"),
        (None, {"kernels": COMBINE, "wanted": {"dtype": "bf16"}}, f"dtype: {ALONE} 'bf16'"),
        (None, {"kernels": "combine"}, "kernel: expected family(name=value, ...), got 'combine'"),
    ],
)
def test_invalid_arguments_are_rejected(
    model: str | None, arguments: dict[str, Any], message: str
) -> None:
    """A conflicting argument is rejected instead of ignored."""
    models = {} if model is None else {"models": model}

    with pytest.raises(ArgumentError) as caught:
        selected(**models, **arguments)

    assert str(caught.value).startswith(message)


def test_prewarm_takes_the_same_arguments() -> None:
    """`mlagen.prewarm` passes all arguments on."""
    report = mlagen.prewarm(
        "sm_90a", models="deepseek-v3", tp=8, kernels=str(COMBINE), dry_run=True, page_size=32
    )

    use = ServingOptions(tp=(8,), page_sizes=(32,))
    assert [unit.spec for unit in report.units] == [COMBINE, *model_specs(SM_90A, V3, use)]
