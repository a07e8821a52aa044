"""The attention function ``paged|mlagen`` for continuous batching: prompts and decode steps."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import transformers

from mlagen.decode import xqa_batch_decode_with_kv_cache
from mlagen.errors import UnsupportedError
from mlagen.integrations.transformers.steps import once_a_step, record, workspace_of

_SERVED = "5.17."  # 5.18 has another cache, and 5.19 admits no names but its own
_WIDTH = 64  # block tables have a multiple of so many tokens


def is_paged_cache_known() -> bool:
    """Return whether continuous batching of the installed transformers can call this module."""
    version: str = transformers.__version__
    return version.startswith(_SERVED)


class _Tables(NamedTuple):
    """Block tables of pages of one token, and the lengths of a batch."""

    block_tables: torch.Tensor  # int32 [requests, max_seq_len]
    seq_lens: torch.Tensor  # int32 [requests]
    q_cu_seq_lens: torch.Tensor  # int32 [requests + 1]
    max_seq_len: int


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with all requests of a batch in one ragged call, each of them causal.

    Block tables are filled for flash attention alone. Other implementations get the position of
    each token in the cache, which is a block table of pages of one token. ``query``, ``key`` and
    ``value`` are ``[1, heads, tokens, head_dim]``, the new tokens of all requests; the keywords
    have the paged cache, and which tokens of it belong to which request. Raises UnsupportedError if
    there is no paged cache, or that of another version, or the layer has a sliding window or
    attention sinks.
    """
    del attention_mask
    cache = kwargs.get("cache")
    if cache is None:
        raise UnsupportedError("cache: expected the paged cache of continuous batching, got None")
    if not hasattr(cache, "sliding_windows"):
        raise UnsupportedError(
            f"transformers: expected 5.17 for continuous batching, got {transformers.__version__}"
        )
    if kwargs.get("s_aux") is not None or cache.sliding_windows[module.layer_idx] != 1:
        raise UnsupportedError("layer: expected no sliding window and no attention sinks")
    group, index = cache.layer_index_to_group_indices[module.layer_idx]
    read, write = kwargs["read_index"][group], kwargs["write_index"][group]
    keys, values = cache.key_cache[index], cache.value_cache[index]
    keys.index_copy_(0, write, key.transpose(1, 2).squeeze(0))
    values.index_copy_(0, write, value.transpose(1, 2).squeeze(0))
    # A batch of whole prompts reads nothing back: its new tokens are all that it attends to.
    # Every batch has a new tensor of query offsets, which all layers of a group share.
    slots = read if read.numel() else write
    tables = once_a_step(kwargs["cu_seq_lens_q"], (group,), partial(_tables_of, slots, kwargs))
    record("mlagen GQA, continuous batching")
    out = xqa_batch_decode_with_kv_cache(
        query.squeeze(0).transpose(0, 1).contiguous(),
        (keys.unsqueeze(1), values.unsqueeze(1)),
        workspace_of(query),
        tables.block_tables,
        tables.seq_lens,
        tables.max_seq_len,
        bmm1_scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        q_len_per_req=max(2, int(kwargs["max_seqlen_q"])),  # ragged calls take 2 or more
        q_cu_seq_lens=tables.q_cu_seq_lens,
        logits_soft_cap=kwargs.get("softcap"),
    )
    assert isinstance(out, torch.Tensor)
    return out.unsqueeze(0), None


def _tables_of(slots: torch.Tensor, kwargs: dict[str, Any]) -> _Tables:
    ends = _full_attention(kwargs["cu_seq_lens_k"])
    # Steps with tables of one width have one key; entries past a request are not read.
    max_seq_len = -(-max(1, int(_full_attention(kwargs["max_seqlen_k"]))) // _WIDTH) * _WIDTH
    positions = torch.arange(max_seq_len, dtype=torch.int64, device=slots.device)
    slot = ends[:-1, None] + positions
    return _Tables(
        slots[slot.clamp(max=slots.numel() - 1)].int(),
        (ends[1:] - ends[:-1]).int(),
        kwargs["cu_seq_lens_q"].int(),
        max_seq_len,
    )


def _full_attention(given: Any) -> Any:
    """Return the value of full-attention layers, where layer types have different ones."""
    return given["full_attention"] if isinstance(given, dict) else given
