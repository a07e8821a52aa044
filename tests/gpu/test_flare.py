"""flare_mla_decoding on a GPU: shared tests, CUDA graphs, and no device synchronization."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.device_sync import no_device_sync
from tests.flare_dense_semantics import FlareDenseSemantics
from tests.flare_masks import MASKS
from tests.flare_problems import (
    FORMATS,
    RAGGED,
    cached_lengths,
    check,
    decode,
    flare_case,
    pad,
)
from tests.flare_semantics import FlareSemantics


class TestFlareOnGpu(FlareSemantics, FlareDenseSemantics):
    """Shared tests, on a GPU."""

    device = "cuda"


@pytest.mark.parametrize("form", ["ragged", "padded", "one token each"])
@pytest.mark.parametrize("name", MASKS)
def test_a_call_does_not_synchronize(name: str, form: str) -> None:
    """A call is enqueued without a device synchronization, whatever the mask."""
    problem, rule = RAGGED.build("cuda"), MASKS[name]
    mask = rule.mask(6, 6, "cuda")
    rule = replace(rule, mask=lambda *_: mask)
    padded = pad(problem, q_len=5)
    one: dict[str, Any] = {
        "q": padded.query[:, :1].contiguous(),
        "valid_length": padded.valid,
        "ragged": False,
    }
    full: dict[str, Any] = {"q": padded.query, "valid_length": padded.valid, "ragged": False}
    cached = cached_lengths(problem)
    changes = {"ragged": {}, "padded": full, "one token each": one}[form]
    decode(problem, rule, cache_lengths=cached, **changes)  # compiles and loads

    with no_device_sync():
        out = decode(problem, rule, cache_lengths=cached, **changes)

    if form != "one token each":
        check(problem, rule, out[padded.is_token] if form == "padded" else out)


@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("name", ["causal", "numbers, in a window"])
def test_a_replay_follows_lengths_and_tables(name: str, row_format: str) -> None:
    """A captured call replays with other lengths, tables and contents."""
    first_case = replace(FORMATS[row_format], q_lens=(5, 6), seq_lens=(8, 60))
    cases = [
        replace(first_case, seq_lens=lens, seed=lens[0]) for lens in ((25, 400), (45, 6), (300, 50))
    ]
    problems = [case.build("cuda") for case in cases]
    rule = MASKS[name]
    mask = rule.mask(2, 6, "cuda")
    captured = replace(rule, mask=lambda *_: mask)
    problem = first_case.build("cuda")
    cached = cached_lengths(problem)
    table = torch.zeros(2, 40, dtype=torch.int32, device="cuda")
    table[:, : problem.block_tables.shape[1]] = problem.block_tables
    blocks = torch.zeros(60, *problem.kv_cache.shape[1:], dtype=torch.uint8, device="cuda").repeat(
        1, 1, problem.kv_cache.element_size()
    )
    blocks = blocks.view(problem.kv_cache.dtype)
    scales = torch.zeros(60, 16, device="cuda") if "kv_scales" in problem.extra_args else None
    changes: dict[str, Any] = {
        "cache_lengths": cached,
        "block_table": table,
        "blocks": blocks,
        "scales": scales,
    }
    decode(problem, captured, **changes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(problem, captured, **changes)

    for other in problems:
        table.fill_(-1)
        table[:, : other.block_tables.shape[1]] = other.block_tables
        cached.copy_(cached_lengths(other))
        pages = other.kv_cache.shape[0]
        blocks.view(torch.uint8)[:pages] = other.kv_cache.view(torch.uint8)
        problem.query.view(torch.uint8).copy_(other.query.view(torch.uint8))
        if scales is not None:
            scales[:pages] = other.extra_args["kv_scales"]
            problem.extra_args["query_scales"].copy_(other.extra_args["query_scales"])
        graph.replay()

        check(other, rule, out)


@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("row_format", ["bf16", "fp8_per_token"])
def test_long_sequences(row_format: str, heads: int) -> None:
    """Split sequences are right, for any number of heads."""
    kv_format = "" if row_format == "bf16" else row_format
    case = flare_case(
        seq_lens=(30_000, 128, 5000), q_lens=(1, 1, 1), heads=heads, kv_format=kv_format
    )
    case = replace(case, page_size=128)
    problem, rule = case.build("cuda"), MASKS["all"]

    out = decode(problem, rule)

    check(problem, rule, out)
