"""Sparse MLA over the FP8 KV cache of DeepSeek-V3.2, checked against float32.

Shows how a token is packed into a row of 656 bytes (fp8_ds_mla), how top-k indices name cache
slots, and the call. Each query token attends to the tokens that its indices name, and to no others.

Run it:     python3 examples/sparse_fp8.py
Prints:     the device, the bytes of a row, the shape of the output, and the largest error.
Exits with: 1 if the output is wrong.
"""

from __future__ import annotations

import sys

import torch

from mlagen.mla import trtllm_batch_decode_with_kv_cache_mla

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
E4M3 = torch.float8_e4m3fn
LATENT, ROPE, PAGE_SIZE, SOFTMAX_SCALE = 512, 64, 64, 192**-0.5
HEADS, TOP_K, SEQ_LENS = (
    (128, 2048, [8192, 3000, 700, 5000])
    if DEVICE.type == "cuda"
    else (16, 64, [200, 130, 40])  # the last has fewer tokens than indices
)


def pack(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Return rows[n, 656] of uint8: 512 e4m3, one fp32 scale for each 128 of them, 64 bf16."""
    groups = latent.float().reshape(-1, 4, 128)
    scales = groups.abs().amax(dim=2).clamp(min=1e-4) / torch.finfo(E4M3).max
    stored = (groups / scales[:, :, None]).to(E4M3).view(-1, LATENT)
    parts = (stored, scales, rope.bfloat16())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1)


def unpack(rows: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of rows, [n, 576]."""
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    rope = rows[:, 528:].contiguous().view(torch.bfloat16).float()
    groups = rows[:, :512].contiguous().view(E4M3).float().view(-1, 4, 128)
    return torch.cat([(groups * scales[:, :, None]).view(-1, LATENT), rope], dim=1)


torch.manual_seed(0)
batch, pages_per_request = len(SEQ_LENS), max(SEQ_LENS) // PAGE_SIZE + 1
pages = torch.randperm(batch * pages_per_request, device=DEVICE).view(batch, -1)
slots = pages.numel() * PAGE_SIZE
tokens = torch.randn(slots, LATENT + ROPE, device=DEVICE)
kv_cache = pack(tokens[:, :LATENT], tokens[:, LATENT:]).view(-1, PAGE_SIZE, 656)
query = torch.randn(batch, 1, HEADS, LATENT + ROPE, device=DEVICE).bfloat16()

# An indexer chooses positions within the request. The call takes cache slots,
# page * PAGE_SIZE + slot in the page, and skips entries of -1.
indices = torch.full((batch, 1, TOP_K), -1, dtype=torch.int32, device=DEVICE)
for request, length in enumerate(SEQ_LENS):
    chosen = torch.randperm(length, device=DEVICE)[:TOP_K]
    slot = pages[request, chosen // PAGE_SIZE] * PAGE_SIZE + chosen % PAGE_SIZE
    indices[request, 0, : len(slot)] = slot.int()

out = trtllm_batch_decode_with_kv_cache_mla(
    query,
    kv_cache,
    torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE),  # workspace
    qk_nope_head_dim=128,
    kv_lora_rank=LATENT,
    qk_rope_head_dim=ROPE,
    block_tables=indices,
    seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32, device=DEVICE),
    max_seq_len=max(SEQ_LENS),
    sparse_mla_top_k=TOP_K,
    bmm1_scale=SOFTMAX_SCALE,
)
assert isinstance(out, torch.Tensor)  # with return_lse=True it is a pair

print("device:", torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU, plain PyTorch")
print("bytes of a row:", kv_cache.shape[-1])
print("output:", list(out.shape))
error = largest = 0.0
for request in range(batch):
    valid = indices[request, 0][indices[request, 0] >= 0].long()
    attended = unpack(kv_cache.view(-1, 656)[valid])
    scores = query[request, 0].float() @ attended.T * SOFTMAX_SCALE
    expected = scores.softmax(dim=-1) @ attended[:, :LATENT]
    error = max(error, (out[request, 0].float() - expected).abs().max().item())
    largest = max(largest, expected.abs().max().item())
print(f"largest error: {error:.1e}, of outputs up to {largest:.2f}")
sys.exit(0 if error < 1e-2 * largest else 1)
