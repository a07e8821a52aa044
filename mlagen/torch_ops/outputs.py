"""Output shapes and dtypes of the ops; a size may be symbolic."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.families.common.arguments import DTYPES
from mlagen.torch_ops.traced import Shape

_XQA_MLA_RANK = 512


def mla_dtype(query: torch.Tensor) -> torch.dtype:
    """Return the dtype of an MLA output."""
    return query.dtype if query.dtype in DTYPES else torch.bfloat16


def mla_outputs(given: dict[str, Any]) -> list[Shape]:
    """Return the output of an MLA call, and its LSE, which is empty unless requested."""
    query = given["query"]
    if not isinstance(query, torch.Tensor):
        query = query[0]
    rows = query.shape[:-1]
    shape = (*rows, given["kv_lora_rank"])
    lse: tuple[int, ...] = (0,)
    if given.get("return_lse"):
        lse = (rows[0] * rows[1], rows[2]) if len(rows) == 3 else tuple(rows)
    return [(shape, mla_dtype(query)), (lse, torch.float32)]


def dsv4_outputs(given: dict[str, Any]) -> list[Shape]:
    """Return the output of a call over two pools, and its LSE, which is empty unless requested."""
    query = given["query"]
    lse = tuple(query.shape[:-1]) if given["return_lse"] else (0,)
    return [(tuple(query.shape), mla_dtype(query)), (lse, torch.float32)]


def gqa_shape(
    query: torch.Tensor, kv: torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor]
) -> tuple[int, ...]:
    """Return the shape of a grouped-query output: that of the query, with the dims of a value."""
    if isinstance(kv, torch.Tensor) or kv[1].shape[-1] == kv[0].shape[-1]:
        return tuple(query.shape)
    values = kv[1]
    return (*query.shape[:-1], values.shape[-1] * (2 if values.dtype is torch.uint8 else 1))


def gqa_outputs(given: dict[str, Any]) -> list[Shape]:
    """Return the output of a grouped-query call, and its LSE, which is empty unless requested."""
    query, q_len, out = given["query"], given["q_len_per_req"], given.get("out")
    shape = gqa_shape(query, given["kv_cache"])
    if out is not None:
        shape = tuple(out.shape)
    elif q_len is not None and q_len > 1 and given["q_cu_seq_lens"] is None:
        shape = (query.shape[0] // q_len, q_len, *shape[1:])
    lse = shape[:-1] if given["return_lse"] else (0,)
    return [(shape, query.dtype), (lse, torch.float32)]


def trtllm_gqa_outputs(given: dict[str, Any]) -> list[Shape]:
    """Return the output of a grouped-query call of TensorRT-LLM's signature, and its LSE."""
    query = given["query"]
    lse = tuple(query.shape[:-1]) if given["return_lse"] else (0,)
    shape = gqa_shape(query, given["kv_cache"])
    return [(shape, given["out_dtype"] or query.dtype), (lse, torch.float32)]


def sparse_gqa_outputs(given: dict[str, Any]) -> list[Shape]:
    """Return the output of a sparse grouped-query call, and its LSE, empty unless requested."""
    query = given["q"]
    has_lse = given.get("return_lse", given.get("return_softmax_lse"))
    lse = tuple(query.shape[:-1]) if has_lse else (0,)
    return [(tuple(query.shape), query.dtype), (lse, torch.float32)]


def xqa_outputs(given: dict[str, Any]) -> list[Shape]:
    """Return the output of a call of ``xqa``, and its LSE."""
    query = given["q"]
    shape = gqa_shape(query, (given["k_cache"], given["v_cache"]))
    return [(shape, query.dtype), (shape[:-1], torch.float32)]


def xqa_mla_outputs(given: dict[str, Any]) -> list[Shape]:
    """Return the output of a call of ``xqa_mla``."""
    query = given["q"]
    return [((*query.shape[:-1], _XQA_MLA_RANK), mla_dtype(query))]


def unused_by_xqa(workspace: torch.Tensor) -> dict[str, Any]:
    """Return the arguments that ``xqa`` and ``xqa_mla`` do not use."""
    return {"semaphores": workspace[:0].view(torch.int32)}
