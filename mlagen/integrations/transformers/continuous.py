"""The attention function ``paged|mlagen`` for continuous batching: prompts and decode steps."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.decode import xqa_batch_decode_with_kv_cache
from mlagen.errors import UnsupportedError
from mlagen.integrations.transformers.pages import workspace_of
from mlagen.integrations.transformers.record import record


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with all requests of a batch in one ragged call.

    Block tables are filled for flash attention alone. Other implementations get the position of
    each token in the cache, which is a block table of pages of one token.

    Parameters
    ----------
    module : torch.nn.Module
        The attention layer.
    query, key, value : torch.Tensor
        ``[1, heads, tokens, head_dim]``, the new tokens of all requests.
    attention_mask : torch.Tensor
        Ignored: every request is causal.
    scaling : float
        Of the scores.
    **kwargs
        The paged cache, and which tokens of it belong to which request.

    Returns
    -------
    tuple of torch.Tensor and None
        ``[1, tokens, heads, head_dim]``, and no attention weights.

    Raises
    ------
    UnsupportedError
        If there is no paged cache, or the layer has a sliding window or attention sinks.
    """
    del attention_mask
    cache = kwargs.get("cache")
    if cache is None:
        raise UnsupportedError("cache: expected the paged cache of continuous batching, got None")
    if kwargs.get("s_aux") is not None or cache.sliding_windows[module.layer_idx] != 1:
        raise UnsupportedError("layer: expected no sliding window and no attention sinks")
    group, index = cache.layer_index_to_group_indices[module.layer_idx]
    read, write = kwargs["read_index"][group], kwargs["write_index"][group]
    keys, values = cache.key_cache[index], cache.value_cache[index]
    keys.index_copy_(0, write, key.transpose(1, 2).squeeze(0))
    values.index_copy_(0, write, value.transpose(1, 2).squeeze(0))
    # A batch of whole prompts reads nothing back: its new tokens are all that it attends to.
    slots = read if read.numel() else write
    ends = _full_attention(kwargs["cu_seq_lens_k"])
    max_seq_len = max(1, int(_full_attention(kwargs["max_seqlen_k"])))
    slot = ends[:-1, None] + torch.arange(max_seq_len, device=query.device)
    record("mlagen GQA, continuous batching")
    out = xqa_batch_decode_with_kv_cache(
        query.squeeze(0).transpose(0, 1).contiguous(),
        (keys.unsqueeze(1), values.unsqueeze(1)),
        workspace_of(query),
        slots[slot.clamp(max=slots.numel() - 1)].int(),
        (ends[1:] - ends[:-1]).int(),
        max_seq_len,
        bmm1_scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        q_len_per_req=max(2, int(kwargs["max_seqlen_q"])),  # ragged calls take 2 or more
        q_cu_seq_lens=kwargs["cu_seq_lens_q"].int(),
    )
    assert isinstance(out, torch.Tensor)
    return out.unsqueeze(0), None


def _full_attention(given: Any) -> Any:
    """Return the value of full-attention layers, where layer types have different ones."""
    return given["full_attention"] if isinstance(given, dict) else given
