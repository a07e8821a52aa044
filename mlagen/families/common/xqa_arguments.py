"""Checks that the entry points of ``flashinfer.xqa`` share."""

from __future__ import annotations

import torch

from mlagen.families.common.arguments import (
    INT32_MAX,
    reject,
    require_device,
    require_dims,
    require_dtype,
    require_tensor,
    require_whole_number,
)

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


def table_capacity(page_table: object, page_size: int) -> int:
    """Return the capacity of a row of the block table, in tokens."""
    table = require_tensor(page_table, "page_table")
    require_dims(table, "page_table", (2,))
    return min(table.shape[1] * page_size, INT32_MAX)


def require_size(given: object, argument: str, known: int) -> None:
    """Reject another size than the known one of ``k_cache``."""
    if given.__class__ is int and given == known and known >= 1:
        return
    if require_whole_number(given, argument, min_value=1) != known:
        reject(argument, f"{known} (of k_cache)", given)
