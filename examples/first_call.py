"""One MLA decode step over a paged KV cache, checked against plain PyTorch.

Shows the arguments of a call as DeepSeek-V3 makes it: absorbed queries, the latent cache in pages,
block tables and the softmax scale. The first call compiles its kernels on a GPU, and a later call,
or another process, finds them in the cache.

Run it:     python3 examples/first_call.py
Prints:     the device, the duration of the first and of the second call, and the largest error.
Exits with: 1 if the output is wrong.
"""

from __future__ import annotations

import sys
import time

import torch

from mlagen.mla import trtllm_batch_decode_with_kv_cache_mla

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS = 16  # DeepSeek-V3 has 128: those of one GPU of eight
LATENT, ROPE = 512, 64  # kv_lora_rank and qk_rope_head_dim
PAGE_SIZE = 64
SOFTMAX_SCALE = 192**-0.5  # of the head dim before absorption, 128 + 64
SEQ_LENS = [4096, 1000, 17, 2500] * 8 if DEVICE.type == "cuda" else [130, 17, 64]


def attend(query: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return attention of query[heads, 576] over tokens[n, 576] in float32."""
    scores = query.float() @ tokens.float().T * SOFTMAX_SCALE
    return scores.softmax(dim=-1) @ tokens.float()[:, :LATENT]


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


torch.manual_seed(0)
batch = len(SEQ_LENS)
pages_per_request = max(SEQ_LENS) // PAGE_SIZE + 1
pages = batch * pages_per_request

query = torch.randn(batch, 1, HEADS, LATENT + ROPE, device=DEVICE).bfloat16()
kv_cache = torch.randn(pages, PAGE_SIZE, LATENT + ROPE, device=DEVICE).bfloat16()
# The pages of a request may lie anywhere in the cache, in any order.
block_tables = torch.randperm(pages, device=DEVICE).int().view(batch, pages_per_request)
seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32, device=DEVICE)
workspace = torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)  # needs no initial value


def decode() -> torch.Tensor:
    """Return the output of one decode step, [batch, 1, heads, 512]."""
    out = trtllm_batch_decode_with_kv_cache_mla(
        query,
        kv_cache,
        workspace,
        qk_nope_head_dim=128,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=max(SEQ_LENS),
        bmm1_scale=SOFTMAX_SCALE,
    )
    assert isinstance(out, torch.Tensor)  # with return_lse=True it is a pair
    return out


print("device:", torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU, plain PyTorch")
for name in ("first", "second"):
    start = time.perf_counter()
    out = decode()
    synchronize()
    print(f"{name} call: {(time.perf_counter() - start) * 1e3:.1f} ms")

error = largest = 0.0
for request, length in enumerate(SEQ_LENS):
    tokens = kv_cache[block_tables[request].long()].flatten(0, 1)[:length]
    expected = attend(query[request, 0], tokens)
    error = max(error, (out[request, 0].float() - expected).abs().max().item())
    largest = max(largest, expected.abs().max().item())
print(f"largest error: {error:.1e}, of outputs up to {largest:.2f}")
sys.exit(0 if error < 1e-2 * largest else 1)
