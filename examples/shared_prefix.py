"""Decode of requests that share a prompt: one call over all pages, against two calls and a merge.

Shows calls over the prefix, once for all requests, and over the rest of each; GQA and MLA.

Run it:     python3 examples/shared_prefix.py
Prints:     a line of JSON for each case: on a GPU the microseconds of both, in a CUDA graph.
Exits with: 1 if the outputs differ by more than the rounding of both parts.
"""

from __future__ import annotations

import json
import time
from functools import partial
from itertools import product
from typing import Any

import torch

from mlagen import max_workspace_bytes
from mlagen.cascade import merge_state
from mlagen.decode import xqa_batch_decode_with_kv_cache
from mlagen.mla import trtllm_batch_decode_with_kv_cache_mla

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_GPU = DEVICE.type == "cuda"
PREFIXES, REQUESTS = ((4096, 16384), (32, 128)) if IS_GPU else ((128,), (3,))
OWN_TOKENS, PAGE_SIZE, CACHES, REPLAYS = 256, 64, 8 if IS_GPU else 1, 20
# Heads, KV heads and head dim: of Llama 3 70B, and of DeepSeek-V3 on one of eight GPUs.
SHAPES = {"gqa": (64, 8, 128), "mla": (16, 1, 576)}
workspace = torch.empty(max_workspace_bytes(DEVICE), dtype=torch.uint8, device=DEVICE)


def calls_of(family: str, prefix: int, requests: int) -> tuple[Any, Any]:
    """Return one call over all pages, and two calls with a merge, over a random cache."""
    heads, kv_heads, width = SHAPES[family]
    pages, shared_pages = (prefix + requests * OWN_TOKENS) // PAGE_SIZE, prefix // PAGE_SIZE
    options: Any = {"dtype": torch.bfloat16, "device": DEVICE}
    cache = torch.randn(2, pages, PAGE_SIZE, kv_heads, width, **options)
    query = torch.randn(requests, heads, width, **options)
    shared = torch.arange(shared_pages, dtype=torch.int32, device=DEVICE)[None]
    own = torch.arange(shared_pages, pages, dtype=torch.int32, device=DEVICE).view(requests, -1)

    def call(tables: torch.Tensor, length: int, *, is_prefix: bool = False) -> Any:
        lens = torch.full((len(tables),), length, dtype=torch.int32, device=DEVICE)
        words: Any = {"bmm1_scale": width**-0.5, "return_lse": True, "return_lse_base": "base2"}
        if family == "gqa":
            words |= {"q_len_per_req": requests // len(tables), "causal": not is_prefix}
            args: Any = (query, tuple(cache), workspace, tables, lens, length)
            return partial(xqa_batch_decode_with_kv_cache, *args, **words)
        if is_prefix:  # the query tokens follow all tokens of the cache
            words |= {"enable_dcp": True, "causal_seqlens_kv_global": lens + requests}
        rows = query.view(len(tables), -1, heads, width)
        args = (rows, cache[0].squeeze(2), workspace, 128, 512, 64, tables, lens, length)
        return partial(trtllm_batch_decode_with_kv_cache_mla, *args, **words)

    parts = call(shared, prefix, is_prefix=True), call(own, OWN_TOKENS)
    whole = call(torch.cat([shared.expand(requests, -1), own], dim=1), prefix + OWN_TOKENS)

    def merged() -> torch.Tensor:
        states = [tensor.view(requests, heads, -1) for part in parts for tensor in part()]
        return merge_state(states[0], states[1][..., 0], states[2], states[3][..., 0])[0]

    return lambda: whole()[0].view(requests, heads, -1), merged


def microseconds(calls: list[Any]) -> float:
    """Return the time of a call in a graph of calls, each over a cache of its own."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _ = [call() for call in calls]
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / REPLAYS / len(calls) * 1e6


for family, prefix, requests in product(SHAPES, PREFIXES, REQUESTS):
    calls = [calls_of(family, prefix, requests) for _ in range(CACHES)]
    for one, two in calls:
        wanted, found = one(), two()
        assert (found - wanted).abs().max() <= 2**-7 * wanted.abs().max()
    row: dict[str, Any] = {"family": family, "prefix": prefix, "requests": requests}
    if IS_GPU:
        row |= {"one_call_us": microseconds([one for one, _ in calls])}
        row |= {"two_calls_us": microseconds([two for _, two in calls])}
    print(json.dumps(row))
