"""Reference attention in fp32, in plain torch on any device."""

from __future__ import annotations

import torch

from .inputs import Inputs


def attend(inputs: Inputs) -> torch.Tensor:
    """Return the output of the first set, fp32 ``[batch, q_len, heads, head_dim_vo]``.

    One request and KV head at a time, to hold the scores of one in memory.
    """
    case = inputs.case
    shape = (case.batch, case.q_len, case.heads, case.head_dim_vo)
    out = torch.empty(shape, dtype=torch.float32, device=inputs.seq_lens.device)
    group = case.heads // case.kv_heads
    for request, (seq_len, pages) in enumerate(zip(case.seq_lens, inputs.pages, strict=True)):
        ids = inputs.block_tables[request, :pages].long()
        for kv_head in range(case.kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            query = inputs.queries[0][request, :, heads].float()
            keys = _rows(inputs.keys[0], ids, kv_head)[:seq_len]
            values = _rows(inputs.values[0], ids, kv_head)[:seq_len]
            out[request, :, heads] = _attend(query * inputs.scale, keys, values)
    return out


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of ``expected``."""
    difference = out.float().reshape(expected.shape) - expected
    return float(difference.norm() / expected.norm())


def _rows(cache: torch.Tensor, ids: torch.Tensor, kv_head: int) -> torch.Tensor:
    # As bytes: not every version of torch can index e4m3.
    pages = cache[:, :, kv_head].view(torch.uint8)[ids].view(cache.dtype)
    return pages.flatten(0, 1).float()


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the attention of a request; its last ``q_len`` tokens are the query tokens."""
    scores = query @ keys.T
    q_len, seq_len = len(query), len(keys)
    if q_len > 1:
        positions = torch.arange(seq_len, device=keys.device)
        last = torch.arange(seq_len - q_len, seq_len, device=keys.device)
        scores = scores.masked_fill(positions > last[:, None, None], -torch.inf)
    return torch.softmax(scores, dim=-1) @ values
