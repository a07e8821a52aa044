"""Shapes and dtypes of the ops' outputs; a size may be symbolic."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.families.common.arguments import DTYPES
from mlagen.torch_ops.traced import Shape

_XQA_MLA_RANK = 512


def mla_dtype(query: torch.Tensor) -> torch.dtype:
    """Return the dtype of an MLA output."""
    return query.dtype if query.dtype in DTYPES else torch.bfloat16


def mla_output(given: dict[str, Any]) -> Shape:
    """Return the output of an MLA call."""
    query = given["query"]
    if not isinstance(query, torch.Tensor):
        query = query[0]
    return (*query.shape[:-1], given["kv_lora_rank"]), mla_dtype(query)


def dsv4_output(given: dict[str, Any]) -> Shape:
    """Return the output of a call over two pools."""
    query = given["query"]
    return tuple(query.shape), mla_dtype(query)


def xqa_mla_output(given: dict[str, Any]) -> Shape:
    """Return the output of a call of ``xqa_mla``."""
    query = given["q"]
    return (*query.shape[:-1], _XQA_MLA_RANK), mla_dtype(query)


def gqa_shape(
    query: torch.Tensor, kv: torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor]
) -> tuple[int, ...]:
    """Return the shape of a grouped-query output: that of the query, with the dims of a value."""
    if isinstance(kv, torch.Tensor) or kv[1].shape[-1] == kv[0].shape[-1]:
        return tuple(query.shape)
    values = kv[1]
    return (*query.shape[:-1], values.shape[-1] * (2 if values.dtype is torch.uint8 else 1))


def gqa_output(given: dict[str, Any]) -> Shape:
    """Return the output of a grouped-query call."""
    query, q_len, out = given["query"], given["q_len_per_req"], given.get("out")
    shape = gqa_shape(query, given["kv_cache"])
    if out is not None:
        shape = tuple(out.shape)
    elif q_len is not None and q_len > 1 and given["q_cu_seq_lens"] is None:
        shape = (query.shape[0] // q_len, q_len, *shape[1:])
    return shape, query.dtype


def trtllm_gqa_output(given: dict[str, Any]) -> Shape:
    """Return the output of a grouped-query call of TensorRT-LLM's signature."""
    query = given["query"]
    return gqa_shape(query, given["kv_cache"]), given["out_dtype"] or query.dtype


def sparse_gqa_output(given: dict[str, Any]) -> Shape:
    """Return the output of a sparse grouped-query call."""
    return tuple(given["q"].shape), given["q"].dtype


def xqa_output(given: dict[str, Any]) -> Shape:
    """Return the output of a call of ``xqa``."""
    query = given["q"]
    return gqa_shape(query, (given["k_cache"], given["v_cache"])), query.dtype


def unused_by_xqa(workspace: torch.Tensor) -> dict[str, Any]:
    """Return the arguments that ``xqa`` and ``xqa_mla`` do not use."""
    return {"semaphores": workspace[:0].view(torch.int32)}
