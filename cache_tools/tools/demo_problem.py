"""The decode of `mlagen demo`, and the comparison of its result with float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# DeepSeek-V3 with tensor parallelism 8, and requests of very different lengths.
SEQ_LENS = (17, 64, 1000, 2500, 4099, 9001)
HEADS = 16
PAGE_SIZE = 64
KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
SCALE = 192**-0.5


def problem_on(device: str) -> dict[str, Any]:
    """Return the arguments of the call, and the tokens of each request for the reference."""
    import torch

    generator = torch.Generator().manual_seed(0)
    width = KV_LORA_RANK + QK_ROPE_HEAD_DIM
    counts = [-(-length // PAGE_SIZE) for length in SEQ_LENS]
    order = torch.randperm(sum(counts), generator=generator)
    # Slots outside of all requests are NaN: a kernel that reads one fails the comparison.
    cache = torch.full((sum(counts), PAGE_SIZE, width), torch.nan, dtype=torch.bfloat16)
    tables = torch.full((len(SEQ_LENS), max(counts)), -1, dtype=torch.int32)
    tokens = []
    page_ids = torch.split(order, counts)
    for request, (length, pages) in enumerate(zip(SEQ_LENS, page_ids, strict=True)):
        slots = torch.full((len(pages) * PAGE_SIZE, width), torch.nan, dtype=torch.bfloat16)
        slots[:length] = torch.randn(length, width, generator=generator)
        cache[pages] = slots.view(len(pages), PAGE_SIZE, width)
        tables[request, : len(pages)] = pages
        tokens.append(slots[:length])
    query = torch.randn(len(SEQ_LENS), 1, HEADS, width, generator=generator).bfloat16()
    return {
        "tokens": tokens,
        "query": query.to(device),
        "kv_cache": cache.to(device),
        "block_tables": tables.to(device),
        "seq_lens": torch.tensor(SEQ_LENS, dtype=torch.int32).to(device),
        "workspace_buffer": torch.empty(64 << 20, dtype=torch.uint8, device=device),
    }


def decode(problem: dict[str, Any]) -> torch.Tensor:
    """Return the output of the call."""
    from mlagen.mla import trtllm_batch_decode_with_kv_cache_mla

    tensors = {name: value for name, value in problem.items() if name != "tokens"}
    out = trtllm_batch_decode_with_kv_cache_mla(
        **tensors,
        qk_nope_head_dim=128,
        kv_lora_rank=KV_LORA_RANK,
        qk_rope_head_dim=QK_ROPE_HEAD_DIM,
        max_seq_len=max(SEQ_LENS),
        bmm1_scale=SCALE,
    )
    assert not isinstance(out, tuple)
    return out


def result_of(problem: dict[str, Any], out: torch.Tensor) -> dict[str, Any]:
    """Compare every element with float64, within its rounding bound.

    With u = 2^-8 of bf16: 2 u of the result, for rounding it and for a single weight; 3.5 u of the
    root of sum((P * V)^2), six standard deviations of independently rounded P; and 2^-13 of
    sum(P * |V|) for the float32 intermediates.
    """
    import torch

    largest, share = 0.0, 0.0
    for request, tokens in enumerate(problem["tokens"]):
        query = problem["query"][request, 0].cpu().double()
        values = tokens[:, :KV_LORA_RANK].double()
        weights = torch.softmax(query @ tokens.double().T * SCALE, dim=1)
        expected = weights @ values
        spread = (weights.square() @ values.square()).sqrt()
        bound = 2**-8 * (2 * expected.abs() + 3.5 * spread) + 2**-13 * (weights @ values.abs())
        error = (out[request, 0].cpu().double() - expected).abs()
        error = torch.where(error.isnan(), math.inf, error)
        largest = max(largest, error.max().item())
        share = max(share, (error / bound).max().item())
    return {"largest_error": largest, "share_of_bound": share, "is_right": share <= 1}
