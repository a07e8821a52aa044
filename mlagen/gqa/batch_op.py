"""The torch op of runs of :class:`mlagen.decode.BatchDecodeWithPagedKVCacheWrapper`."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.errors import ArgumentError
from mlagen.families.common.arguments import require_flag
from mlagen.gqa.batch_plan import DecodePlan, PageLayout
from mlagen.gqa.batch_run import run_planned
from mlagen.gqa.batch_settings import DecodeSettings
from mlagen.observe.observed import observable
from mlagen.torch_ops.traced import as_op, traceable


def _outputs(given: dict[str, Any]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    query = given["q"]
    lse = tuple(query.shape[:2]) if given["return_lse"] else (0,)
    return [(tuple(query.shape), given["o_data_type"]), (lse, torch.float32)]


@traceable(_outputs, has_lse=True)
@observable
def batch_decode_run(
    workspace_buffer: torch.Tensor,
    q: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor],
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
    q_len: int,
    is_causal: bool,
    window: int,
    kv_layout: str,
    kv_data_type: torch.dtype,
    o_data_type: torch.dtype,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | None = None,
    kv_cache_sf: torch.Tensor
    | tuple[torch.Tensor, torch.Tensor]
    | list[torch.Tensor]
    | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute a planned run. The lengths lie within the page ids, as a plan has checked."""
    settings = DecodeSettings(
        num_qo_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=q.shape[2],
        page_size=page_size,
        q_len=q_len,
        is_causal=is_causal,
        window=window,
        sm_scale=1.0,
        kv_layout=kv_layout,
        q_data_type=q.dtype,
        kv_data_type=kv_data_type,
        o_data_type=o_data_type,
    )
    layout = PageLayout(kv_indptr=kv_indptr, kv_indices=kv_indices, seq_lens=seq_lens)
    plan = DecodePlan(settings=settings, layout=layout, max_kv_len=max_kv_len)
    tensors = (workspace_buffer, q, paged_kv_cache, kv_cache_sf, bmm1_scale, bmm2_scale)
    result = run_planned(plan, *tensors, out, lse, sinks, return_lse, enable_pdl)
    return result[0], result[1] if len(result) > 1 else None


def call_planned(
    plan: DecodePlan,
    workspace: torch.Tensor,
    q: torch.Tensor,
    paged_kv_cache: Any,
    kv_cache_sf: Any,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    return_lse: bool,
    enable_pdl: bool | None,
) -> tuple[torch.Tensor, ...]:
    """Compute a planned run as an op; a compiler traces this."""
    settings, layout = plan.settings, plan.layout
    for name, expected, got in (
        ("q.shape[1]", settings.num_qo_heads, q.shape[1]),
        ("q.shape[2]", settings.head_dim, q.shape[2]),
        ("q.dtype", settings.q_data_type, q.dtype),
    ):
        if got != expected:
            raise ArgumentError(f"{name}: expected {expected} (of plan), got {got}")
    has_lse = require_flag(return_lse, "return_lse") or lse is not None
    result: Any = as_op(
        "batch_decode_run",
        workspace,
        q,
        paged_kv_cache,
        layout.kv_indptr,
        layout.kv_indices,
        layout.seq_lens,
        settings.num_kv_heads,
        settings.page_size,
        settings.q_len,
        settings.is_causal,
        settings.window,
        settings.kv_layout,
        settings.kv_data_type,
        settings.o_data_type,
        plan.max_kv_len,
        bmm1_scale,
        bmm2_scale,
        sinks,
        kv_cache_sf,
        out,
        lse,
        has_lse,
        enable_pdl,
    )
    return result if has_lse else (result,)
