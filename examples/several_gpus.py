"""One MLA decode step over a KV cache that several GPUs share, against one GPU.

Shows decode context parallel: rank r of W has the tokens r, r + W, r + 2 W ... and its own heads.

Run it:     python3 examples/several_gpus.py
            python3 examples/several_gpus.py 2  (ranks; by default all GPUs, or two on the CPU)
Prints:     for each batch and length, the times on one GPU and on all, eager and in a CUDA graph.
Exits with: 1 if the outputs differ by more than the rounding of the partial outputs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from mlagen import max_workspace_bytes
from mlagen.distributed import decode_cp
from mlagen.mla import trtllm_batch_decode_with_kv_cache_mla

GPUS = torch.cuda.device_count()
CASES = [(b, n) for n in (131072, 524288) for b in (1, 16)] if GPUS else [(2, 300), (1, 1001)]
HEADS = 128 if GPUS else 8  # of all ranks
LATENT, ROPE, PAGE_SIZE, REPEATS, CALLS_OF_A_GRAPH = 512, 64, 64, 20, 8


def call_of(decode: Any, query: torch.Tensor, tokens: torch.Tensor, *others: Any) -> Any:
    """Return a call over a cache of each request's tokens."""
    batch, length, width = tokens.shape
    pages, device = -(-length // PAGE_SIZE), tokens.device
    cache = tokens.new_zeros(batch, pages * PAGE_SIZE, width)
    cache[:, :length] = tokens
    tables = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    workspace = torch.empty(max_workspace_bytes(device), dtype=torch.uint8, device=device)
    cached = (cache.view(-1, PAGE_SIZE, width), workspace, 128, LATENT, ROPE, tables, lengths)
    return partial(decode, query, *cached, length, *others, bmm1_scale=192**-0.5)


def times_of(call: Any) -> str:
    """Return the times of a call, eager and in a graph of calls; its kernels are loaded already."""
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        _ = [call() for _ in range(CALLS_OF_A_GRAPH)]
    for run, calls in ((call, 1), (graph.replay, CALLS_OF_A_GRAPH)):
        run()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        _ = [run() for _ in range(REPEATS)]
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / REPEATS / calls * 1e6)
    return f"{times[0]:.0f} us, {times[1]:.0f} us in a graph"


def run_rank(rank: int, world: int, where: str) -> None:
    """Check and time every case as one of the ranks."""
    device = torch.device("cuda", rank) if GPUS else torch.device("cpu")
    torch.cuda.set_device(rank if GPUS else -1)  # a negative one has no effect
    options: Any = {"backend": "nccl", "device_id": device} if GPUS else {"backend": "gloo"}
    dist.init_process_group(init_method=where, rank=rank, world_size=world, **options)
    for batch, length in CASES:
        tokens = torch.randn(batch, length, LATENT + ROPE, device=device).bfloat16()
        query = torch.randn(HEADS, batch, 1, LATENT + ROPE, device=device).bfloat16()
        for tensor in (tokens, query):
            dist.broadcast(tensor, 0)
        query = query.movedim(0, 2)  # head by head in memory, as a batched GEMM leaves it
        lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        one = call_of(trtllm_batch_decode_with_kv_cache_mla, query, tokens)
        own_query, own_tokens = query.chunk(world, dim=2)[rank], tokens[:, rank::world]
        every = call_of(decode_cp, own_query, own_tokens, lengths)
        wanted = one()
        difference = float((every() - wanted.chunk(world, dim=2)[rank]).abs().max())
        assert difference <= 2**-7 * float(wanted.abs().max()), f"difference {difference}"
        times = f"one GPU {times_of(one)}; {world} ranks {times_of(every)}" if GPUS else "CPU"
        if rank == 0:
            print(f"{batch} x {length} tokens: {times}; difference {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else GPUS or 2
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (ranks, f"file://{folder}/rendezvous"), nprocs=ranks)  # type: ignore[no-untyped-call]
