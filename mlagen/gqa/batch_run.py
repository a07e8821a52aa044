"""Runs of a planned batch decode."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.families.common.arguments import (
    canonical_sinks,
    is_pdl_enabled,
    reject_dtype,
    require,
    require_flag,
    require_tensor,
)
from mlagen.families.common.call_key import KeyKinds
from mlagen.families.common.memory import require_plain
from mlagen.families.gqa.args import GqaArgNames, GqaArgs, converted_query, pair_of
from mlagen.families.gqa.dispatch import GQA
from mlagen.gqa.batch_plan import DecodePlan
from mlagen.torch_ops.replayable import replayable

_NAMES = GqaArgNames(
    query="q",
    kv_cache="paged_kv_cache",
    key_cache="paged_kv_cache[0]",
    value_cache="paged_kv_cache[1]",
    workspace_buffer="float_workspace_buffer",
    block_tables="indices",
    kv_indptr="indptr",
    seq_lens="last_page_len",
    bmm1_scale="sm_scale * q_scale * k_scale",
    bmm2_scale="v_scale",
)


@replayable(
    GQA,
    KeyKinds(
        tensors="float_workspace_buffer q *plan.tensors",
        groups="paged_kv_cache kv_cache_sf",
        optional="out lse sinks",
        outputs="out lse",
        scales="bmm1_scale bmm2_scale",
        length="plan.max_kv_len",
        constants=("plan.key",),
        options="return_lse enable_pdl",
    ),
    returns="outputs",
    has_op=False,
)
def run_planned(
    plan: DecodePlan,
    float_workspace_buffer: torch.Tensor,
    q: torch.Tensor,
    paged_kv_cache: Any,
    kv_cache_sf: Any = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute a run, whose tensors are checked against its plan; returns the requested outputs.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule or differs from the plan.
    """
    settings, layout = plan.settings, plan.layout
    keys, cached_values = pair_of(paged_kv_cache, "paged_kv_cache")
    scales = (None, None) if kv_cache_sf is None else pair_of(kv_cache_sf, "kv_cache_sf")
    _check_as_planned(plan, q, keys, out)
    args = GqaArgs(
        query=converted_query(q, "q", settings.o_data_type),
        key_cache=keys,
        value_cache=cached_values,
        workspace_buffer=float_workspace_buffer,
        block_tables=layout.kv_indices,
        kv_indptr=layout.kv_indptr,
        seq_lens=layout.seq_lens,
        max_seq_len=plan.max_kv_len,
        q_len=settings.q_len,
        kv_layout=settings.kv_layout,
        window=settings.window,
        is_causal=settings.is_causal,
        out=out,
        out_dtype=settings.o_data_type,
        is_out_like_query=True,
        lse=lse,
        return_lse=require_flag(return_lse, "return_lse") or lse is not None,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=canonical_sinks(sinks),
        key_scales=scales[0],
        value_scales=scales[1],
        names=_NAMES,
    )
    return GQA.dispatch(args, is_pdl_enabled(enable_pdl), out)


def _check_as_planned(plan: DecodePlan, q: object, keys: object, out: object) -> None:
    """Reject tensors that differ from the plan."""
    settings = plan.settings
    query, cache = require_tensor(q, "q"), require_tensor(keys, "paged_kv_cache")
    require_plain(query, "q")
    require_plain(cache, "paged_kv_cache")
    for name, tensor, dtype, planned in (
        ("q", query, settings.q_data_type, "q_data_type"),
        ("paged_kv_cache", cache, settings.kv_data_type, "kv_data_type"),
        ("out", out, settings.o_data_type, "o_data_type"),
    ):
        if isinstance(tensor, torch.Tensor) and tensor.dtype is not dtype:
            reject_dtype(f"{name}.dtype", f"{dtype} ({planned} of plan)", tensor.dtype)
    tokens, q_len = plan.layout.seq_lens.shape[0] * settings.q_len, settings.q_len
    expected = (tokens, settings.num_qo_heads, settings.head_dim)
    why = f"batch * q_len_per_req of {q_len}, num_qo_heads and head_dim of plan"
    require(tuple(query.shape) == expected, "q.shape", f"{list(expected)} ({why})", query.shape)
    if cache.dim() in {4, 5}:
        sizes = (settings.page_size, settings.num_kv_heads)
        axes = (-3, -2) if settings.kv_layout == "NHD" else (-2, -3)
        given = tuple(cache.shape[axis] for axis in axes)
        rule = f"{list(sizes)} (of plan)"
        require(given == sizes, "paged_kv_cache: page_size and num_kv_heads", rule, list(given))
