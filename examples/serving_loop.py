"""A decode loop as a server runs it: continuous batching, growing block tables, CUDA graphs.

Shows buffers that keep their addresses, pages that sequences take and free, and one CUDA graph per
batch size (on the CPU, eager steps). The model is one MLA layer with random weights; no prefill.

Run it:     python3 examples/serving_loop.py
Prints:     the device, the tokens of each sequence, and the largest distance from greedy.
Exits with: 1 if a token is not the greedy choice of the same model in float32, up to rounding.
"""

from __future__ import annotations

import sys

import torch

from mlagen.mla import trtllm_batch_decode_with_kv_cache_mla

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, WIDTH, HEADS, PAGE_SIZE, MAX_PAGES, SCALE = 64, 128, 16, 16, 4, 192**-0.5
BATCH_SIZES = (1, 2, 4)  # three sequences are padded to four

torch.manual_seed(0)
shapes = (VOCAB, WIDTH), (WIDTH, 576), (WIDTH, HEADS * 576), (HEADS * 512, VOCAB)
embedding, to_kv, to_query, to_logits = (
    torch.randn(shape).to(DEVICE, torch.bfloat16) * 0.3 for shape in shapes
)
kv_cache = torch.zeros(16, PAGE_SIZE, 576, dtype=torch.bfloat16, device=DEVICE)
free_pages = list(range(1, len(kv_cache)))  # page 0 takes the KV of padding
workspace = torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)
tokens, slots = torch.zeros(2, BATCH_SIZES[-1], dtype=torch.int64, device=DEVICE)
seq_lens = torch.zeros(BATCH_SIZES[-1], dtype=torch.int32, device=DEVICE)
tables = torch.zeros(BATCH_SIZES[-1], MAX_PAGES, dtype=torch.int32, device=DEVICE)


def step(batch: int) -> None:
    """Store the KV of each token of the batch, attend, and replace the token by the next one."""
    hidden = embedding[tokens[:batch]]
    kv_cache.view(-1, 576).index_copy_(0, slots[:batch], hidden @ to_kv)
    query = (hidden @ to_query).view(batch, 1, HEADS, 576)
    call = (query, kv_cache, workspace, 128, 512, 64, tables[:batch], seq_lens[:batch])
    # A graph serves every length up to max_seq_len.
    out = trtllm_batch_decode_with_kv_cache_mla(*call, MAX_PAGES * PAGE_SIZE, bmm1_scale=SCALE)
    tokens[:batch] = (torch.as_tensor(out).view(batch, -1) @ to_logits).argmax(dim=-1)


def logits_after(sequence: list[int]) -> torch.Tensor:
    """Return the logits of the next token, in float32 and without a cache."""
    hidden = embedding[sequence].float()
    keys = (hidden @ to_kv.float()).bfloat16().float()
    query = (hidden[-1] @ to_query.float()).view(HEADS, 576)
    out = (query @ keys.T * SCALE).softmax(dim=-1) @ keys[:, :512]
    return torch.matmul(out.flatten(), to_logits.float())


graphs: dict[int, torch.cuda.CUDAGraph] = {}
for size in BATCH_SIZES if DEVICE.type == "cuda" else ():
    step(size)  # loads the kernels, which a capture cannot do
    graphs[size] = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graphs[size]):
        step(size)

print("device:", torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU, plain PyTorch")
# The tokens of a sequence, all but the last of them cached; its pages; its length at the end.
waiting: list[tuple[list[int], list[int], int]] = [([n], [], n) for n in (5, 40, 9, 20, 14)]
running, gap = waiting[:0], 0.0
while waiting or running:
    while waiting and len(running) < BATCH_SIZES[-1]:
        running.append(waiting.pop(0))
    size = next(size for size in BATCH_SIZES if size >= len(running))
    rows = [(0, 0, 0, [0] * MAX_PAGES)] * size  # padding attends to no token
    for row, (text, pages, _) in enumerate(running):
        page, place = divmod(len(text) - 1, PAGE_SIZE)
        if page == len(pages):
            pages.append(free_pages.pop())
        table = pages + [0] * (MAX_PAGES - len(pages))
        rows[row] = (text[-1], pages[page] * PAGE_SIZE + place, len(text), table)
    for column, buffer in enumerate((tokens, slots, seq_lens, tables)):
        buffer[:size] = torch.tensor([row[column] for row in rows])
    graphs[size].replay() if graphs else step(size)
    for (text, pages, end), token in zip(tuple(running), tokens.tolist(), strict=False):
        logits = logits_after(text)
        gap = max(gap, ((logits.max() - logits[token]) / logits.std()).item())
        text.append(token)
        if len(text) == end:
            print(*text)
            free_pages.extend(pages)
            running.remove((text, pages, end))
print(f"largest distance from greedy: {gap:.1e} standard deviations of the logits")
sys.exit(0 if gap < 5e-2 else 1)
