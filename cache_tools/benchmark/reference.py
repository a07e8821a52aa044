"""Reference attention in fp32, in plain torch on any device."""

from __future__ import annotations

import torch

from .formats import Stored, dequantize
from .inputs import Inputs


def attend(inputs: Inputs) -> torch.Tensor:
    """Return the output of the first set, fp32 ``[batch, q_len, heads, head_dim_vo]``.

    One request and KV head at a time, to hold the scores of one in memory.
    """
    case = inputs.case
    shape = (case.batch, case.q_len, case.heads, case.head_dim_vo)
    out = torch.empty(shape, dtype=torch.float32, device=inputs.seq_lens.device)
    group = case.heads // case.kv_heads
    for request, seq_len in enumerate(case.seq_lens):
        slots = _slots(inputs, request)
        mask = None if case.top_k else _mask(seq_len, case.q_len, case.window_left, out.device)
        for kv_head in range(case.kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            query = inputs.queries[0][request, :, heads].float() * inputs.scale
            keys = _rows(inputs, inputs.keys[0], slots, kv_head)
            values = (
                keys if case.family == "mla" else _rows(inputs, inputs.values[0], slots, kv_head)
            )
            scores = query @ keys.mT
            if mask is not None:
                scores = scores.masked_fill(mask, -torch.inf)
            out[request, :, heads] = torch.softmax(scores, dim=-1) @ values[..., : shape[-1]]
    return out


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of ``expected``."""
    difference = out.float().reshape(expected.shape) - expected
    return float(difference.norm() / expected.norm())


def _slots(inputs: Inputs, request: int) -> torch.Tensor:
    """Return the slots of a request's tokens, or those of each of its query tokens."""
    if inputs.topk_indices is not None:
        return inputs.topk_indices[request].long()
    seq_len, page_size = inputs.case.seq_lens[request], inputs.case.page_size
    tokens = torch.arange(seq_len, device=inputs.block_tables.device)
    pages = inputs.block_tables[request, tokens // page_size].long()
    return pages * page_size + tokens % page_size


def _rows(inputs: Inputs, cache: Stored, slots: torch.Tensor, kv_head: int) -> torch.Tensor:
    def gather(stored: torch.Tensor) -> torch.Tensor:
        # As bytes: not every version of torch can index e4m3.
        rows = stored[:, :, kv_head].flatten(0, 1).view(torch.uint8)
        return rows[slots].view(stored.dtype)

    scales = None if cache.block_scales is None else gather(cache.block_scales)
    rows = Stored(data=gather(cache.data), block_scales=scales)
    return dequantize(inputs.case.kv_dtype, rows)


def _mask(seq_len: int, q_len: int, window_left: int, device: torch.device) -> torch.Tensor | None:
    """Return where a row of the last ``q_len`` tokens does not attend, ``[q_len, 1, seq_len]``."""
    if q_len == 1 and window_left < 0:
        return None
    tokens = torch.arange(seq_len, device=device)
    own = torch.arange(seq_len - q_len, seq_len, device=device)[:, None, None]
    mask = tokens > own
    return mask if window_left < 0 else mask | (tokens < own - window_left)
