"""One MLA decode step over a KV cache that several GPUs share, against one GPU.

Shows decode context parallel: rank r of W has the tokens r, r + W, r + 2 W ... and its own heads.

Run it:     python3 examples/several_gpus.py
            torchrun --nproc-per-node=2 examples/several_gpus.py
Prints:     for each length, the time of one GPU and of all ranks, and the largest difference.
Exits with: 1 if the outputs differ by more than the rounding of the partial outputs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mlagen.distributed import decode_cp, local_seq_lens
from mlagen.mla import trtllm_batch_decode_with_kv_cache_mla

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
HAS_GPUS = torch.cuda.device_count() >= WORLD
DEVICE = torch.device("cuda", RANK) if HAS_GPUS else torch.device("cpu")
HEADS = 128 if HAS_GPUS else 8  # of all ranks
SEQ_LENS = (131072, 524288) if HAS_GPUS else (300, 1001)
LATENT, ROPE, PAGE_SIZE = 512, 64, 64


def paged(tokens: torch.Tensor) -> dict[str, Any]:
    """Return the cache of one request, and the arguments of a call over it."""
    length, pages = len(tokens), -(-len(tokens) // PAGE_SIZE)
    cache = tokens.new_zeros(pages * PAGE_SIZE, LATENT + ROPE)
    cache[:length] = tokens
    return {
        "kv_cache": cache.view(pages, PAGE_SIZE, -1),
        "workspace_buffer": torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE,
        "block_tables": torch.arange(pages, dtype=torch.int32, device=DEVICE)[None],
        "seq_lens": torch.tensor([length], dtype=torch.int32, device=DEVICE),
        "max_seq_len": length,
        "bmm1_scale": 192**-0.5,
    }


def timed(decode: Callable[..., Any], **arguments: Any) -> tuple[torch.Tensor, float]:
    """Return the output, and the microseconds of a call on the GPU."""
    repeats = 20 if HAS_GPUS else 1
    out: torch.Tensor = decode(**arguments)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        decode(**arguments)
    if HAS_GPUS:
        torch.cuda.synchronize()
    return out, (time.perf_counter() - start) / repeats * 1e6


if HAS_GPUS:
    torch.cuda.set_device(DEVICE)
store = dist.HashStore() if WORLD == 1 else None  # type: ignore[attr-defined]
options = {"backend": "nccl", "device_id": DEVICE} if HAS_GPUS else {"backend": "gloo"}
dist.init_process_group(store=store, rank=RANK, world_size=WORLD, **options)
failed = False
for length in SEQ_LENS:
    torch.manual_seed(length)
    tokens = torch.randn(length, LATENT + ROPE, device=DEVICE).bfloat16()
    query = torch.randn(1, 1, HEADS, LATENT + ROPE, device=DEVICE).bfloat16()
    dist.broadcast(tokens, 0)
    dist.broadcast(query, 0)
    lengths = torch.tensor([length], dtype=torch.int32, device=DEVICE)
    heads = slice(RANK * HEADS // WORLD, (RANK + 1) * HEADS // WORLD)
    whole, own = paged(tokens), paged(tokens[RANK::WORLD])
    assert torch.equal(own["seq_lens"], local_seq_lens(lengths, WORLD, RANK))

    wanted, alone = timed(trtllm_batch_decode_with_kv_cache_mla, query=query, **whole)
    own |= {"query": query[:, :, heads]}
    out, shared = timed(decode_cp, causal_seqlens_kv_global=lengths, **own)
    difference = float((out - wanted[:, :, heads]).abs().max())
    failed |= difference > 2**-7 * float(wanted.abs().max())
    if RANK == 0:
        times = f"one GPU {alone:.0f} us, {WORLD} ranks {shared:.0f} us"
        print(f"{length} tokens: {times if HAS_GPUS else 'CPU'}, difference {difference:.1e}")
dist.destroy_process_group()
sys.exit(failed)
