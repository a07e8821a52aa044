"""The CPU backend: the same functions in plain torch, to develop and test without a GPU.

It follows the kernels' rules for empty rows, sinks and LSE, in float32. It is slow.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from mlagen.api.mla_inputs import MlaInputs
from mlagen.api.mla_request import MlaRequest


def decode_mla(
    inputs: MlaInputs, request: MlaRequest, cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output ``[tokens, heads, kv_lora_rank]`` and the LSE ``[tokens, heads]``."""
    query = inputs.query.reshape(request.tokens, *inputs.query.shape[-2:]).float()
    out = torch.zeros(request.tokens, request.heads, request.kv_lora_rank)
    lse = torch.full((request.tokens, request.heads), -math.inf)
    ends = _query_ends(inputs, request)
    capacity = request.max_pages * request.page_size
    for index, (start, end) in enumerate(pairwise(ends)):
        seq_len = min(max(int(inputs.seq_lens[index]), 0), capacity)
        keys = _gather(inputs, cache, index, seq_len)
        for token in range(start, end):
            visible = max(0, seq_len - (end - start) + (token - start) + 1)
            out[token], lse[token] = _attend(inputs, query[token], keys[:visible])
    factor = math.log(2) if inputs.return_lse_base == "basee" else 1.0
    return out.to(request.dtype), lse * factor


def _query_ends(inputs: MlaInputs, request: MlaRequest) -> list[int]:
    if inputs.cum_seq_lens_q is not None:
        return [int(end) for end in inputs.cum_seq_lens_q]
    return [index * request.q_len for index in range(request.batch + 1)]


def _gather(inputs: MlaInputs, cache: torch.Tensor, index: int, seq_len: int) -> torch.Tensor:
    """Return the first ``seq_len`` tokens of a request; a page that is none reads as zero."""
    pages, page_size, width = cache.shape
    used = -(-seq_len // page_size)
    ids = inputs.block_tables[index, :used].long()
    exists = (ids >= 0) & (ids < pages)
    rows = torch.zeros(used, page_size, width)
    rows[exists] = cache[ids[exists]].float()
    return rows.reshape(used * page_size, width)[:seq_len]


def _attend(
    inputs: MlaInputs, query: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with one query token ``[heads, head_dim_qk]`` to the keys that it sees."""
    heads = query.shape[0]
    if len(keys) == 0:
        return torch.zeros(heads, inputs.kv_lora_rank), torch.full((heads,), -math.inf)
    scores = query @ keys.T * float(inputs.bmm1_scale)
    if inputs.sinks is not None:
        scores = torch.cat([scores, inputs.sinks[:, None]], dim=1)
    weights = torch.softmax(scores, dim=1)[:, : len(keys)]
    out = weights @ keys[:, : inputs.kv_lora_rank] * float(inputs.bmm2_scale)
    return out, torch.logsumexp(scores, dim=1) / math.log(2)
