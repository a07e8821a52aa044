"""BatchMLA without plans, as FlashInfer's cutlass backend: block tables, one query token each."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.errors import ArgumentError
from mlagen.families.common.arguments import INT32_MAX, require_dims, require_tensor, shown
from mlagen.families.common.memory import require_memory, require_plain
from mlagen.families.mla.args import MlaArgNames, MlaArgs
from mlagen.families.mla.dispatch import run_mla
from mlagen.mla.batch_checks import checked_fp8_out, require_positive, saturated_into

_NAMES = MlaArgNames(
    query="q_nope",
    query_rope="q_pe",
    kv_cache="ckv_cache",
    rope_cache="kpe_cache",
    workspace_buffer="float_workspace_buffer",
    block_tables="page_table",
    seq_lens="kv_len",
)

_SOFTMAX_SCALE = 192**-0.5  # of DeepSeek's heads before absorption: 128 + 64 elements


def run_planless(
    workspace: torch.Tensor,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    *,
    out: torch.Tensor | None,
    kv_len: torch.Tensor | None,
    page_table: torch.Tensor | None,
    o_scale: float | None,
    rejected: dict[str, Any],
) -> torch.Tensor:
    """Return ``out[batch, heads, 512]``; ``rejected`` has the arguments of planned runs by name.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; no kernel is launched, and the outputs are unchanged.
    """
    for name, value in rejected.items():
        if value is not None:
            raise ArgumentError(
                f"{name} does not support cutlass backend, expected none, got {shown(value)}"
            )
    parts = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache}
    for name, tensor in parts.items():
        require_plain(require_tensor(tensor, name), name)
        require_dims(tensor, name, (3,))
    tables = require_tensor(page_table, "page_table")
    require_dims(tables, "page_table", (2,))
    if o_scale is not None:
        o_scale = require_positive(o_scale, "o_scale")
        out = checked_fp8_out(out, q_nope, 512)
    try:
        query, query_rope = q_nope.unsqueeze(1), q_pe.unsqueeze(1)
    except RuntimeError:  # freed storage
        require_memory(q_nope, "q_nope")
        require_memory(q_pe, "q_pe")
        raise
    args = MlaArgs(
        query=query,
        kv_cache=ckv_cache,
        workspace_buffer=workspace,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        block_tables=tables,
        seq_lens=require_tensor(kv_len, "kv_len"),
        max_seq_len=min(tables.shape[1] * ckv_cache.shape[1], INT32_MAX),
        out=out if o_scale is None else None,
        bmm1_scale=_SOFTMAX_SCALE,
        bmm2_scale=1.0 if o_scale is None else 1.0 / o_scale,
        query_rope=query_rope,
        rope_cache=kpe_cache,
        out_shape=(*q_nope.shape[:2], 512),
        names=_NAMES,
    )
    result, _ = run_mla(args, enable_pdl=True)
    if o_scale is None or out is None:
        return result
    return saturated_into(out, result)
