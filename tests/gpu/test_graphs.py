"""Captured calls with every kind of cache: a replay follows all content of the tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from mlagen.decode import BatchDecodeWithPagedKVCacheWrapper
from mlagen.mla.wrapper import BatchMLAPagedAttentionWrapper
from tests.graph_replay import captured, check_replays, exchange
from tests.problems import batch_decode
from tests.problems.batch_mla import WORKSPACE_BYTES, batch_case, plan_arguments, run, run_arguments
from tests.problems.entry_points import ENTRY_POINTS
from tests.problems.flare import flare_case
from tests.problems.gqa import KINDS as GQA_KINDS
from tests.problems.gqa import gqa_case
from tests.problems.mla import KINDS, SPARSE_KINDS, mla_case

# All have as many pages of 16 or 64 tokens, so that the tensors keep their shapes.
LENGTHS = ((5000, 70, 1, 0), (3, 0, 4999, 66), (0, 4998, 80, 2), (65, 2, 0, 4994))
DRAFTS = ((1, 3, 0, 2), (3, 2, 1, 0), (0, 1, 2, 3), (2, 0, 3, 1))
ROUNDS = list(enumerate(zip(LENGTHS, DRAFTS, strict=True)))

MLA_FACTS: dict[str, dict[str, Any]] = {
    **{
        kind: KINDS[kind]
        for kind in ("bf16", "fp16", "e4m3", "bf16 over e4m3", "bf16 over fp8_ds_mla")
    },
    **{
        f"lists over {kind}": KINDS[kind] | {"top_k": 100, "with_top_k_lens": True}
        for kind in SPARSE_KINDS
    },
    "long lists": {"top_k": 2048},
    "values in other pages": {"values": "other pages"},
    "e4m3, values in other pages": KINDS["e4m3"] | {"values": "other pages"},
}


@pytest.mark.parametrize("kind", GQA_KINDS)
@pytest.mark.parametrize("window", [0, 40], ids=["no window", "window"])
@pytest.mark.parametrize("drafts", ["one", "masked", "ragged"])
@pytest.mark.parametrize("name", ["xqa_batch", "xqa", "trtllm_gqa"])
def test_gqa(name: str, drafts: str, window: int, kind: str) -> None:
    """Lengths, tables, caches with scales, masks, sinks and queries may change."""
    problems = [
        gqa_case(
            kind,
            seq_lens=lens,
            q_len=3 if drafts == "masked" else 1,
            q_lens=q_lens if drafts == "ragged" else None,
            mask=None if drafts == "one" else "random",
            kv_heads=1,
            head_dim=64,
            window=window,
            sink=3.0,
            seed=seed,
        ).build("cuda")
        for seed, (lens, q_lens) in ROUNDS
    ]
    changes = {} if name == "xqa" else {"max_seq_len": 5000}

    check_replays(ENTRY_POINTS[name], problems, **changes)


@pytest.mark.parametrize("facts", MLA_FACTS.values(), ids=MLA_FACTS)
@pytest.mark.parametrize("is_ragged", [False, True], ids=["uniform", "ragged"])
@pytest.mark.parametrize("heads", [6, 16])
def test_mla(heads: int, is_ragged: bool, facts: dict[str, Any]) -> None:
    """Lengths, tables or top-k indices and lengths, caches, sinks and queries may change."""
    problems = [
        mla_case(
            "bf16",
            seq_lens=lens,
            heads=heads,
            with_sinks=True,
            seed=seed,
            **({"q_lens": q_lens} if is_ragged else {"q_len": 2}),
            **facts,
        ).build("cuda")
        for seed, (lens, q_lens) in ROUNDS
    ]

    check_replays(ENTRY_POINTS["trtllm"], problems, max_seq_len=5000)


@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
@pytest.mark.parametrize("values", ["shared", "other cache"])
def test_xqa_mla(values: str, kind: str) -> None:
    """Lengths, tables, caches and queries may change."""
    entry = ENTRY_POINTS["xqa_mla"]
    facts: dict[str, Any] = KINDS[kind] | {"values": values, "output_scale": 0.5}
    problems = [
        entry.build("cuda", seq_lens=lens, seed=seed, **facts) for seed, (lens, _) in ROUNDS
    ]

    check_replays(entry, problems)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3", "fp8_per_token"])
@pytest.mark.parametrize("mask", ["causal", "numbers, in a window"])
def test_flare(mask: str, kind: str) -> None:
    """Lengths, tables, caches with scales and queries with scales may change."""
    rounds = (((25, 400), (5, 6)), ((399, 30), (6, 5)), ((26, 398), (5, 6)))
    problems = [
        flare_case(seq_lens=lens, q_lens=q_lens, mask=mask, seed=seed, **KINDS[kind]).build("cuda")
        for seed, (lens, q_lens) in enumerate(rounds)
    ]

    check_replays(ENTRY_POINTS["flare"], problems)


WRAPPER_KINDS = {
    **{kind: KINDS[kind] for kind in ("bf16", "fp16")},
    **{kind: KINDS[kind] for kind in KINDS if kind.startswith("bf16 over e4m3 with")},
}


@pytest.mark.parametrize("kind", WRAPPER_KINDS)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all"])
def test_a_replay_follows_later_plans(is_causal: bool, kind: str) -> None:
    """With CUDA graph buffers a replay computes the latest plan."""
    all_seqs = (
        ((1, 1), (1, 1), (1, 0), (3, 3)),
        ((2, 40), (1, 7), (3, 100), (0, 5)),
        ((0, 5), (3, 2700), (1, 64), (2, 2)),
    )
    facts: dict[str, Any] = {"page_size": 16, "heads": 6, "is_causal": is_causal, **KINDS[kind]}
    problems = [
        batch_case(seqs, seed=seed, **facts).build("cuda") for seed, seqs in enumerate(all_seqs)
    ]
    buffers: list[Any] = [torch.zeros(n, dtype=torch.int32).cuda() for n in (5, 5, 400, 4)]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = BatchMLAPagedAttentionWrapper(workspace, True, *buffers)
    pages = max(len(problem.kv_cache) for problem in problems)
    static = run_arguments(problems[1])
    for name in ("ckv_cache", "kpe_cache", "ckv_scale_arr"):
        if name in static:
            part = static[name].view(torch.uint8)
            static[name] = part.new_zeros(pages, *part.shape[1:]).view(static[name].dtype)
    out, lse = problems[1].new_out(), torch.empty(6, 6, device="cuda")
    wrapper.plan(**plan_arguments(problems[0]))
    graph = captured(partial(run, wrapper, problems[1]), static | {"out": out, "lse": lse})

    for turn, problem in enumerate((problems[1], problems[2], problems[0])):
        wrapper.plan(**plan_arguments(problem, metadata=("cpu", None)[turn % 2]))
        given = run_arguments(problem)
        views = {name: part for name, part in given.items() if isinstance(part, torch.Tensor)}
        exchange({name: static[name][: len(part)] for name, part in views.items()}, views)
        graph.replay()

        problem.check(out, lse)


@pytest.mark.parametrize("kind", GQA_KINDS)
def test_a_replay_follows_later_plans_of_batch_decode(kind: str) -> None:
    """With CUDA graph buffers a replay computes the latest plan, with caches and queries."""
    facts: dict[str, Any] = {"kv_heads": 1, "head_dim": 64, "sink": 3.0}
    captured_one, *problems = [
        gqa_case(kind, seq_lens=lens, seed=seed, **facts).build("cuda")
        for seed, lens in enumerate((LENGTHS[0], *LENGTHS))
    ]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        batch_decode.workspace_for(captured_one),
        use_cuda_graph=True,
        **batch_decode.graph_buffers(captured_one),
    )
    out, lse = captured_one.new_out(), torch.empty(4, 4, device="cuda")
    static = batch_decode.run_arguments(captured_one, out=out, lse=lse)
    wrapper.plan(**batch_decode.plan_arguments(captured_one))
    graph = captured(wrapper.run, static)

    for turn, problem in enumerate(problems):
        metadata = ("cpu", None)[turn % 2]
        wrapper.plan(**batch_decode.plan_arguments(problem, metadata=metadata))
        exchange(static, batch_decode.run_arguments(problem))
        graph.replay()

        problem.check(out, lse)
