"""Which calls the workers of SGLang warm up, by the layers of their model."""

from __future__ import annotations

from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.spec.dtype import DType
from tests.fixture_types import Patch
from tests.integrations.attended import E4M3
from tests.integrations.servers import Import
from tests.integrations.sglang.conftest import GQA_LAYERS, MLA_LAYERS, runner

RUNNER = "mlagen.integrations.sglang.runner"


def facts_of(calls: list[Any]) -> list[dict[str, Any]]:
    """Return each call once, its variant as a dict with the rows of the query."""
    return [
        {each.name: getattr(variant, each.name) for each in fields(variant)} | {"rows": rows}
        for variant, rows in dict.fromkeys(calls)
    ]


@pytest.mark.parametrize("cache", [torch.bfloat16, E4M3])
def test_the_absorbed_layers_are_warmed_up(
    mla: ModuleType, calls: list[Any], cache: torch.dtype
) -> None:
    """SGLang quantizes the query of an FP8 cache; the layers of prefill are none of ours."""
    mla.backend_of(runner(kv_cache_dtype=cache, layers=MLA_LAYERS * 2), "mlagen_mla")

    (call,) = facts_of(calls)
    dtype = DType.E4M3 if cache == E4M3 else DType.BF16
    assert (call["query_dtype"], call["kv_dtype"]) == (dtype, dtype)
    dims = ("kv_lora_rank", "qk_rope_head_dim", "page_size", "rows", "lookup", "mask")
    assert [call[each] for each in dims] == [512, 64, 64, 16, "paged", "causal"]


@pytest.mark.parametrize(("cache", "row_bytes"), [(torch.bfloat16, 1152), (E4M3, 656)])
def test_sparse_layers_are_warmed_up(
    dsa: ModuleType, calls: list[Any], cache: torch.dtype, row_bytes: int
) -> None:
    """An FP8 cache has rows of fp8_ds_mla, and each query token is a sequence."""
    dsa.backend_of(runner(kv_cache_dtype=cache, kv_cache_dim=row_bytes), "mlagen_dsa")

    (call,) = facts_of(calls)
    kv_dtype = DType.FP8_DS_MLA if cache == E4M3 else DType.BF16
    assert (call["query_dtype"], call["kv_dtype"]) == (DType.BF16, kv_dtype)
    assert (call["page_size"], call["rows"], call["lookup"]) == (64, 16, "sparse")


def test_each_shape_of_layers_is_warmed_up(mha: ModuleType, calls: list[Any]) -> None:
    """Gemma 4 has layers of two head dims, and Gemma 2 a soft cap."""
    layers = [*GQA_LAYERS * 2, ((16, 512, 2), {"sliding_window_size": 1023, "logit_cap": 50.0})]
    options = {"use_mla_backend": False, "page_size": 32, "kv_cache_dtype": E4M3}

    mha.backend_of(runner(layers=layers, **options), "mlagen_mha")

    first, second = facts_of(calls)
    assert [first[each] for each in ("head_dim", "page_size", "rows")] == [128, 32, 4]
    assert [second[each] for each in ("head_dim", "page_size", "rows")] == [512, 32, 8]
    assert (first["query_dtype"], first["kv_dtype"]) == (DType.BF16, DType.E4M3)
    assert [each["has_soft_cap"] for each in (first, second)] == [False, True]


@pytest.mark.parametrize(
    ("mode", "prefill", "rows"),
    [("decode", "fa3", [16, 32, 48]), ("prefill", "fa3", [16]), ("prefill", None, [16, 32, 48])],
)
def test_the_verification_of_drafts_is_warmed_up_where_decode_does_it(
    sglang: Import,
    mla: ModuleType,
    calls: list[Any],
    monkeypatch: Patch,
    mode: str,
    prefill: str | None,
    rows: list[int],
) -> None:
    """The query tokens of a request are one, or as many as drafts are verified."""
    spec = SimpleNamespace(speculative_eagle_topk=1, speculative_attention_mode=mode)
    monkeypatch.setattr(sglang(RUNNER), "get_spec", lambda: spec)
    monkeypatch.setattr(sglang(RUNNER), "max_speculative_num_draft_tokens", lambda: 3)
    monkeypatch.setattr(mla, "get_platform", lambda: SimpleNamespace(is_blackwell=True))
    options = {"attention_backend": "mlagen_mla", "prefill_attention_backend": prefill}

    mla.backend_of(runner(**options), "mlagen_mla")

    assert [call["rows"] for call in facts_of(calls)] == rows


def test_ranks_of_dcp_attend_with_the_heads_of_all(
    sglang: Import, mla: ModuleType, calls: list[Any], monkeypatch: Patch
) -> None:
    """The query is gathered, and drafts have the causal mask of all ranks."""
    parallel = SimpleNamespace(dcp_enabled=True, attn_dcp_size=4)
    for module in (mla, sglang(RUNNER)):
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)

    mla.backend_of(runner(layers=[*MLA_LAYERS, ((64, 576), {"v_head_dim": 512})]), "mlagen_mla")

    assert [(call["rows"], call["mask"]) for call in facts_of(calls)] == [
        (64, "causal"),
        (64, "dcp"),
    ]
