"""Captured calls with every kind of cache: a replay follows all content of the tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import mlagen
from mlagen.mla.wrapper import BatchMLAPagedAttentionWrapper
from tests.gqa_cases import DTYPES, Dtypes
from tests.graph_replay import captured, cloned, exchange
from tests.mla_cases import SPARSE_KINDS
from tests.problems.batch_mla import WORKSPACE_BYTES, batch_case, plan_arguments, run, run_arguments
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase, mla_case

# All have as many pages of 16 or 64 tokens, so that the tensors keep their shapes.
_LENGTHS = ((5000, 70, 1, 0), (3, 0, 4999, 66), (0, 4998, 80, 2), (65, 2, 0, 4994))
_DRAFTS = ((1, 3, 0, 2), (3, 2, 1, 0), (0, 1, 2, 3), (2, 0, 3, 1))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 40], ids=["no window", "window"])
@pytest.mark.parametrize("drafts", ["one", "masked", "ragged"])
def test_gqa(drafts: str, window: int, dtypes: Dtypes) -> None:
    """Lengths, tables, caches with scales, masks, sinks and queries may change."""
    cases = [
        GqaCase(
            name="",
            seq_lens=lens,
            q_len=3 if drafts == "masked" else 1,
            q_lens=q_lens if drafts == "ragged" else None,
            mask=None if drafts == "one" else "random",
            kv_heads=1,
            head_dim=64,
            window=window,
            sink=3.0,
            dtype=dtypes.dtype,
            kv=dtypes.kv,
            out_dtype=dtypes.out_dtype,
            output_scale=1.0 if dtypes.kv == "16-bit" else 0.5,
            seed=seed,
        )
        for seed, (lens, q_lens) in enumerate(zip(_LENGTHS, _DRAFTS, strict=True))
    ]
    problems = [case.build("cuda") for case in cases]
    static = cloned(problems[0].arguments(max_seq_len=5000))
    out = torch.empty(problems[0].query.shape, dtype=cases[0].result_dtype, device="cuda")
    static["out"] = out
    names = ["query", "kv_cache", "kv_cache_sf", "block_tables", "seq_lens", "sinks"]
    names += ["mask"] if drafts != "one" else []
    names += ["q_cu_seq_lens"] if drafts == "ragged" else []
    graph = captured(mlagen.decode.xqa_batch_decode_with_kv_cache, static)

    for problem in (*problems[1:], problems[0]):
        exchange(static, problem.arguments(), *names)
        graph.replay()

        problem.check(out)


_VARIANTS: dict[str, MlaCase] = {
    **{
        name: mla_case(name, name="", seq_lens=())
        for name in ("bf16", "fp16", "e4m3", "bf16 over e4m3", "bf16 over fp8_ds_mla")
    },
    **{
        f"lists over {name}": case_of_kind(
            kind, name="", seq_lens=(), top_k=100, with_top_k_lens=True
        )
        for name, kind in SPARSE_KINDS.items()
    },
    "long lists": MlaCase(name="", seq_lens=(), top_k=2048),
    "values in other pages": MlaCase(name="", seq_lens=(), values="other pages"),
    "e4m3, values in other pages": mla_case("e4m3", name="", seq_lens=(), values="other pages"),
}


@pytest.mark.parametrize("variant", _VARIANTS.values(), ids=_VARIANTS)
@pytest.mark.parametrize("is_ragged", [False, True], ids=["uniform", "ragged"])
def test_mla_sm80(is_ragged: bool, variant: MlaCase) -> None:
    """Lengths, tables or top-k indices and lengths, caches, sinks and queries may change."""
    cases = [
        replace(
            variant,
            seq_lens=lens,
            q_lens=q_lens if is_ragged else None,
            q_len=1 if is_ragged else 2,
            heads=6,
            with_sinks=True,
            seed=seed,
        )
        for seed, (lens, q_lens) in enumerate(zip(_LENGTHS, _DRAFTS, strict=True))
    ]
    problems = [case.build("cuda") for case in cases]
    tokens = sum(problems[0].q_lens)
    out_dtype = torch.bfloat16 if variant.dtype is torch.float8_e4m3fn else variant.dtype
    shape = (tokens, 6, 512) if is_ragged else (4, 2, 6, 512)
    out = torch.empty(shape, dtype=out_dtype, device="cuda")
    lse = torch.empty(tokens, 6, device="cuda")
    given = problems[0].arguments(out=out, lse=lse, return_lse=True, max_seq_len=5000)
    static = cloned(given) | {"out": out, "lse": lse}
    names = ["query", "kv_cache", "block_tables", "seq_lens", "sinks"]
    names += ["cum_seq_lens_q"] if is_ragged else []
    names += ["sparse_mla_top_k_lens"] if variant.with_top_k_lens else []
    graph = captured(mlagen.mla.trtllm_batch_decode_with_kv_cache_mla, static)

    for problem in (*problems[1:], problems[0]):
        exchange(static, problem.arguments(), *names)
        graph.replay()

        problem.check(out, lse)


_BATCH_KINDS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"dtype": torch.float16},
    "e4m3": {"kv_format": "e4m3", "scales": "two"},
    "e4m3, scales of tokens": {"kv_format": "e4m3", "scales": "for 128 elements"},
}


@pytest.mark.parametrize("facts", _BATCH_KINDS.values(), ids=_BATCH_KINDS)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all"])
def test_batch_mla_follows_later_plans(is_causal: bool, facts: dict[str, Any]) -> None:
    """With CUDA graph buffers a replay computes the latest plan."""
    all_seqs = (
        ((1, 1), (1, 1), (1, 0), (3, 3)),
        ((2, 40), (1, 7), (3, 100), (0, 5)),
        ((0, 5), (3, 2700), (1, 64), (2, 2)),
    )
    problems = [
        batch_case("", seqs, page_size=16, heads=6, is_causal=is_causal, seed=seed, **facts).build(
            "cuda"
        )
        for seed, seqs in enumerate(all_seqs)
    ]
    ends, starts, ids, lens = (
        torch.zeros(n, dtype=torch.int32, device="cuda") for n in (5, 5, 400, 4)
    )
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = BatchMLAPagedAttentionWrapper(workspace, True, ends, starts, ids, lens)
    pages = max(len(problem.kv_cache) for problem in problems)
    static = run_arguments(problems[1])
    for name in ("ckv_cache", "kpe_cache", "ckv_scale_arr"):
        if name in static:
            part = static[name]
            empty = part.view(torch.uint8).new_zeros(pages, *part.view(torch.uint8).shape[1:])
            static[name] = empty.view(part.dtype)
    outputs = {
        "out": torch.empty_like(problems[1].query),
        "lse": torch.empty(6, 6, device="cuda"),
    }
    wrapper.plan(**plan_arguments(problems[0]))
    graph = captured(partial(run, wrapper, problems[1]), static | outputs)

    for problem in (problems[1], problems[2], problems[0]):
        wrapper.plan(**plan_arguments(problem))
        for name, part in run_arguments(problem).items():
            if isinstance(part, torch.Tensor):
                static[name].view(torch.uint8)[: len(part)] = part.view(torch.uint8)
        graph.replay()

        problem.check(outputs["out"], outputs["lse"])
