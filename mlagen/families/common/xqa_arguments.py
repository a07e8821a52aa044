"""Checks of the ``flashinfer.xqa`` arguments that no kernel reads, and of K and V storage."""

from __future__ import annotations

import torch

from mlagen.families.common.arguments import (
    DTYPES,
    INT32_MAX,
    reject,
    require,
    require_device,
    require_dims,
    require_dtype,
    require_strides,
    require_tensor,
    require_whole_number,
)
from mlagen.families.common.memory import require_memory, require_plain

MLA_KV_LORA_RANK = 512

_SEMAPHORE_DTYPES = (torch.uint32, torch.int32)


def check_unused(query: object, semaphores: object, sm_count: object) -> None:
    """Reject invalid values of arguments that are accepted for compatibility and ignored."""
    device = require_tensor(query, "q").device
    tensor = require_tensor(semaphores, "semaphores")
    if tensor.device != device:  # here and below, formatting the message costs more than the test
        require_device(tensor, "semaphores", device)
    if tensor.dtype not in _SEMAPHORE_DTYPES:
        require_dtype(tensor, "semaphores", _SEMAPHORE_DTYPES)
    if sm_count is not None:
        require_whole_number(sm_count, "sm_count", min_value=1)


def check_caches(
    k_cache: object, v_cache: object, *, num_kv_heads: object, page_size: object, kv_layout: object
) -> None:
    """Reject caches whose sizes differ from ``num_kv_heads`` and ``page_size``."""
    keys = require_tensor(k_cache, "k_cache")
    require_tensor(v_cache, "v_cache")
    require_dims(keys, "k_cache", (4,))
    tokens, heads = (2, 1) if kv_layout == "HND" else (1, 2)
    _require_size(num_kv_heads, "num_kv_heads", keys.shape[heads])
    _require_size(page_size, "page_size", keys.shape[tokens])


def check_scale_caches(k_sf_cache: object, v_sf_cache: object) -> None:
    """Reject scales of keys without scales of values, and vice versa."""
    if k_sf_cache is not None or v_sf_cache is not None:
        require_tensor(k_sf_cache, "k_sf_cache")
        require_tensor(v_sf_cache, "v_sf_cache")


def check_mla_caches(q: object, k_cache: object, v_cache: object, *, page_size: object) -> bool:
    """Return whether keys and values are separate in memory."""
    query = require_tensor(q, "q")
    require_plain(query, "q")
    require_dims(query, "q", (4,))
    require_dtype(query, "q", (*DTYPES, torch.float8_e4m3fn))
    require(query.shape[1] == 1, "q.shape[1]", 1, query.shape[1])
    keys, values = require_tensor(k_cache, "k_cache"), require_tensor(v_cache, "v_cache")
    require_memory(keys, "k_cache")
    require_memory(values, "v_cache")
    require_dims(keys, "k_cache", (3, 4))
    allowed = (query.dtype, torch.float8_e4m3fn)
    if keys.dtype not in allowed:
        require_dtype(keys, "k_cache", tuple(dict.fromkeys(allowed)), "that of q, or e4m3")
    # The product covers the axis of size 1 both before and after the tokens.
    _require_size(page_size, "page_size", keys.shape[1] * (keys.shape[2] if keys.dim() == 4 else 1))
    if values.data_ptr() != keys.data_ptr() or values.device != keys.device:
        return True
    # The same memory; values may be a view of the first elements of each token.
    require_dtype(values, "v_cache", (keys.dtype,), "dtype of k_cache")
    if values.shape[:-1] != keys.shape[:-1]:
        reject("v_cache.shape[:-1]", list(keys.shape[:-1]), list(values.shape[:-1]))
    require_strides(values, "v_cache", keys, "k_cache")
    if not MLA_KV_LORA_RANK <= values.shape[-1] <= keys.shape[-1]:
        rule = f"{MLA_KV_LORA_RANK} to {keys.shape[-1]} (width of k_cache)"
        reject("v_cache.shape[-1]", rule, values.shape[-1])
    return False


def flat_lengths(seq_lens: torch.Tensor) -> torch.Tensor:
    """Return ``[batch]`` for ``[batch, 1]``; anything else unchanged."""
    require_memory(seq_lens, "seq_lens")
    if not isinstance(seq_lens, torch.Tensor) or seq_lens.dim() != 2:
        return seq_lens
    return seq_lens[:, 0] if seq_lens.shape[1] == 1 else seq_lens


def table_capacity(page_table: object, page_size: int) -> int:
    """Return the capacity of a row of the block table, in tokens."""
    table = require_tensor(page_table, "page_table")
    require_dims(table, "page_table", (2,))
    return min(table.shape[1] * page_size, INT32_MAX)


def _require_size(given: object, argument: str, known: int) -> None:
    if given.__class__ is int and given == known and known >= 1:
        return
    if require_whole_number(given, argument, min_value=1) != known:
        reject(argument, f"{known} (of k_cache)", given)
