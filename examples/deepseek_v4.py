"""Decode attention of DeepSeek-V4 over its two pools, checked against float32.

Shows how both pools are written in 584-byte rows, what indices name, and the call. A query token
attends to its last 128 tokens in one pool, and to chosen ones, each for 4 tokens, in the other.

Run it:     python3 examples/deepseek_v4.py
Prints:     the device, the bytes of a row, the shape of the output, and the largest error.
Exits with: 1 if the output is wrong.
"""

from __future__ import annotations

import sys

import torch

from mlagen.mla import trtllm_batch_decode_sparse_mla_dsv4
from mlagen.writers import dsv4_fp8_quantize_append_sparse_mla_cache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CODES, ROW, PAGE_SIZE, WINDOW, RATIO, SCALE = 448, 584, 64, 128, 4, 512**-0.5
HEADS, TOP_K = (64, 512) if DEVICE.type == "cuda" else (8, 64)
SEQ_LENS = [8192, 3000, 88] if DEVICE.type == "cuda" else [400, 300, 88]


def new_pool(tokens: torch.Tensor) -> torch.Tensor:
    """Return a pool[pages, 64, 584] with tokens in its first slots, on pages as FlashMLA's."""
    pages, stride = -(-len(tokens) // PAGE_SIZE), -(-PAGE_SIZE * ROW // 576) * 576
    memory = torch.zeros(pages, stride, dtype=torch.uint8, device=DEVICE)
    pool = memory.as_strided((pages, PAGE_SIZE, ROW), (stride, ROW, 1))
    slots = torch.arange(len(tokens), device=DEVICE)  # page * 64 + slot in the page
    dsv4_fp8_quantize_append_sparse_mla_cache(tokens, slots, pool)
    return pool


def values_of(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return float32 values[n, 512]. A page has data rows of 576 bytes, then scale rows of 8."""
    memory = pool.as_strided((len(pool), pool.stride(0)), (pool.stride(0), 1))
    pages, places = memory[slots // PAGE_SIZE], (slots % PAGE_SIZE)[:, None].long()
    data = pages.gather(1, places * 576 + torch.arange(576, device=DEVICE))
    exponents = pages.gather(1, PAGE_SIZE * 576 + places * 8 + torch.arange(7, device=DEVICE))
    codes = data[:, :CODES].contiguous().view(torch.float8_e4m3fn).float().view(-1, 7, 64)
    scaled = (codes * torch.exp2(exponents.float() - 127)[:, :, None]).view(-1, CODES)
    return torch.cat([scaled, data[:, CODES:].contiguous().view(torch.bfloat16).float()], dim=1)


torch.manual_seed(0)
batch, starts = len(SEQ_LENS), [sum(SEQ_LENS[:request]) for request in range(len(SEQ_LENS))]
tokens = torch.randn(sum(SEQ_LENS), 512, device=DEVICE).bfloat16()
swa_pool, compressed_pool = new_pool(tokens), new_pool(tokens[::RATIO].contiguous())
query = torch.randn(batch, HEADS, 512, device=DEVICE).bfloat16()
sinks = torch.randn(HEADS, device=DEVICE)  # a learned logit of each head

# Indices are slots of a whole pool; those behind their length are not read, and -1 is skipped.
windows = torch.full((batch, WINDOW), -1, dtype=torch.int32, device=DEVICE)
chosen = torch.full((batch, TOP_K), -1, dtype=torch.int32, device=DEVICE)
lens = torch.zeros(2, batch, dtype=torch.int32, device=DEVICE)
for request, (start, length) in enumerate(zip(starts, SEQ_LENS, strict=True)):
    seen, compressed = min(length, WINDOW), length // RATIO
    windows[request, :seen] = torch.arange(start + length - seen, start + length, device=DEVICE)
    picked = torch.randperm(compressed, device=DEVICE)[:TOP_K]  # by the indexer of the model
    chosen[request, : len(picked)] = start // RATIO + picked
    lens[:, request] = torch.tensor([seen, len(picked)])

out = trtllm_batch_decode_sparse_mla_dsv4(
    query,
    swa_pool,
    torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE),  # workspace
    sparse_indices=windows,
    swa_topk_lens=lens[0],
    compressed_kv_cache=compressed_pool,
    extra_sparse_indices=chosen,
    extra_sparse_topk_lens=lens[1],
    bmm1_scale=SCALE,
    sinks=sinks,
)
assert isinstance(out, torch.Tensor)  # with return_lse=True it is a pair

print("device:", torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU, plain PyTorch")
print("bytes of a row:", swa_pool.shape[-1])
print("output:", list(out.shape))
expected = torch.zeros(out.shape, device=DEVICE)
for request, (swa_len, top_k_len) in enumerate(lens.T):
    swa = values_of(swa_pool, windows[request, :swa_len])
    attended = torch.cat([swa, values_of(compressed_pool, chosen[request, :top_k_len])])
    scores = torch.cat([query[request].float() @ attended.T * SCALE, sinks[:, None]], dim=1)
    expected[request] = scores.softmax(dim=-1)[:, :-1] @ attended
error, largest = (out - expected).abs().max(), expected.abs().max()
print(f"largest error: {error:.1e}, of outputs up to {largest:.2f}")
sys.exit(0 if error < 1e-2 * largest else 1)
