"""Runs of a BatchMLA plan: checks of the tensors and scales against the plan."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.families.common.arguments import (
    canonical_sinks,
    reject,
    reject_dtype,
    require,
    require_dims,
    require_flag,
    require_shape,
    require_tensor,
    shown,
)
from mlagen.families.common.call_key import KeyKinds
from mlagen.families.common.memory import require_memory, require_plain
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.dispatch import MLA
from mlagen.mla.batch_checks import (
    check_contract,
    check_outputs,
    checked_bmm_scales,
    checked_kv_scales,
    require_threshold,
)
from mlagen.mla.batch_plan import BatchPlan, BatchSettings
from mlagen.torch_ops.replayable import replayable


@replayable(
    MLA,
    KeyKinds(
        tensors="float_workspace_buffer q_nope q_pe ckv_cache kpe_cache *plan.tensors",
        optional="out lse ckv_scale_arr sinks",
        outputs="out lse",
        length="plan.metadata.max_kv_len",
        constants=("plan.key",),
        options=(
            "return_lse return_lse_base_on_e ckv_scale kpe_scale o_scale "
            "skip_softmax_threshold_scale_factor bmm1_scale bmm2_scale"
        ),
    ),
    returns="outputs",
    has_op=False,
)
def run_planned(
    plan: BatchPlan,
    float_workspace_buffer: torch.Tensor,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    return_lse_base_on_e: bool = False,
    ckv_scale: float | None = None,
    ckv_scale_arr: torch.Tensor | None = None,
    kpe_scale: float | None = None,
    o_scale: float | None = None,
    sinks: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    bmm1_scale: float | None = None,
    bmm2_scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute a run, whose tensors are checked against its plan; returns the requested outputs.

    A query in one tensor is both ``q_nope`` and ``q_pe``, and a cache both of its parts. The output
    is divided by ``o_scale``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule or differs from the plan.
    """
    settings, layout, metadata = plan.settings, plan.layout, plan.metadata
    return_lse = require_flag(return_lse, "return_lse")
    is_natural = require_flag(return_lse_base_on_e, "return_lse_base_on_e")
    bmm_scales = (bmm1_scale, bmm2_scale)
    has_lse = return_lse or lse is not None
    threshold = skip_softmax_threshold_scale_factor
    check_contract(plan.contract, has_lse, is_natural, o_scale, sinks, threshold, *bmm_scales)
    require_threshold(threshold)
    score_scale, out_scale = checked_bmm_scales(*bmm_scales, settings.sm_scale)
    packed_query = q_nope if q_pe is q_nope else None
    packed_cache = ckv_cache if kpe_cache is ckv_cache else None
    if packed_query is not None:
        q_nope, q_pe = split_packed(packed_query, settings, "query")
    if packed_cache is not None:
        ckv_cache, kpe_cache = split_packed(packed_cache, settings, "kv_cache")
    _check_as_planned(plan, q_nope, q_pe, ckv_cache, kpe_cache)
    latent_scale, rope_scale = checked_kv_scales(
        plan.scales_cache, ckv_cache, ckv_scale, ckv_scale_arr, kpe_scale
    )
    check_outputs(out, lse, q_nope, plan.kernel_dtype)
    shape = q_nope.shape
    query, rope = q_nope if packed_query is None else packed_query, q_pe
    is_uniform = metadata.q_len > 0 and metadata.tokens == shape[0]
    if is_uniform:  # CTAs need no search for the request of a token
        grouped = (plan.batch, metadata.q_len, settings.num_heads)
        try:
            query, rope = query.view(*grouped, query.shape[-1]), rope.view(*grouped, rope.shape[-1])
        except RuntimeError:  # freed storage
            require_memory(q_nope, "q_nope")
            require_memory(q_pe, "q_pe")
            raise
    has_rope = settings.head_dim_kpe > 0
    args = MlaArgs(
        query=query,
        kv_cache=ckv_cache if packed_cache is None else packed_cache,
        workspace_buffer=float_workspace_buffer,
        kv_lora_rank=settings.head_dim_ckv,
        qk_rope_head_dim=settings.head_dim_kpe,
        block_tables=layout.kv_indices,
        seq_lens=layout.kv_len_arr,
        max_seq_len=metadata.max_kv_len,
        # The kernels write contiguous rows.
        out=out.view(*query.shape[:-1], settings.head_dim_ckv)
        if out is not None and out.is_contiguous()
        else None,
        bmm1_scale=score_scale,
        bmm2_scale=out_scale if o_scale is None else out_scale / o_scale,
        sinks=canonical_sinks(sinks),
        lse=lse,
        return_lse=has_lse,
        return_lse_base="basee" if is_natural else "base2",
        cum_seq_lens_q=None if is_uniform else layout.qo_indptr,
        max_q_len=None if is_uniform else metadata.max_q_len,
        is_causal=settings.causal,
        query_rope=rope if has_rope and packed_query is None else None,
        rope_cache=kpe_cache if has_rope and packed_cache is None else None,
        kv_scales=ckv_scale_arr,
        latent_scale=latent_scale,
        rope_scale=rope_scale,
        kv_indptr=layout.kv_indptr,
        out_shape=tuple(shape),
        is_planned=True,
        names=plan.names._replace(
            query="q_nope" if packed_query is None else "query",
            kv_cache="ckv_cache" if packed_cache is None else "kv_cache",
        ),
    )
    return MLA.dispatch(args, plan.enable_pdl, out)


def parts_of(value: Any, name: str, *parts: Any) -> tuple[Any, ...]:
    """Return the two parts of a query or a cache; one tensor stands for both.

    Raises
    ------
    ArgumentError
        If it is neither a tensor nor a pair, or its parts are given too.
    """
    if value is None:
        return parts
    if any(part is not None for part in parts):
        reject(name, "None with its parts", "both")
    if isinstance(value, torch.Tensor):
        return value, value
    if isinstance(value, (tuple, list)) and len(value) == 2:
        whole = [part for part in value if not isinstance(part, (tuple, list))]
        if len(whole) == 2:
            return value[0], value[1]
        if len(whole) == 1:  # FlashInfer's form of both
            return whole[0], whole[0]
    return reject(name, "a torch.Tensor, a pair of its parts, or a pair of both", shown(value))


def split_packed(
    packed: torch.Tensor, settings: BatchSettings, name: str, *, has_memory: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latent and the rope part of a query or a cache in one tensor, as views.

    Raises
    ------
    ArgumentError
        If it does not have the planned width.
    """
    require_tensor(packed, name)
    if has_memory:
        require_plain(packed, name)
    require_dims(packed, name, (3,))
    latent, rope = settings.head_dim_ckv, settings.head_dim_kpe
    rule = f"{latent + rope} (head_dim_ckv + head_dim_kpe of plan)"
    require(packed.shape[-1] == latent + rope, f"{name}.shape[-1]", rule, packed.shape[-1])
    try:
        return packed[..., :latent], packed[..., latent:]
    except RuntimeError:  # freed storage
        require_memory(packed, name)
        raise


def _check_as_planned(
    plan: BatchPlan,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
) -> None:
    """Reject tensors that differ from the plan."""
    settings, metadata = plan.settings, plan.metadata
    parts = (
        ("q_nope", q_nope, "q_data_type", settings.q_data_type),
        ("q_pe", q_pe, "q_data_type", settings.q_data_type),
        ("ckv_cache", ckv_cache, "kv_data_type", settings.kv_data_type),
        ("kpe_cache", kpe_cache, "kv_data_type", settings.kv_data_type),
    )
    for name, tensor, planned, dtype in parts:
        is_plain = tensor.__class__ is torch.Tensor and not tensor.is_nested
        if is_plain and tensor.dtype is dtype and tensor.dim() == 3:  # skips formatting a message
            continue
        if require_tensor(tensor, name).dtype is not dtype:
            reject_dtype(f"{name}.dtype", f"{dtype} ({planned} of plan)", tensor.dtype)
        require_plain(tensor, name)
        require_dims(tensor, name, (3,))
    tokens, heads = q_nope.shape[:2]
    if heads != settings.num_heads:
        reject("q_nope.shape[1]", f"{settings.num_heads} (num_heads of plan)", heads)
    if metadata.tokens is not None and tokens < metadata.tokens:
        reject("q_nope.shape[0]", f"{metadata.tokens} (qo_indptr[-1]) or more", tokens)
    if plan.batch == 0:
        require(tokens == 0, "q_nope.shape[0]", "0 (no requests were planned)", tokens)
    if ckv_cache.shape[1] != settings.page_size:
        rule = f"{settings.page_size} (page_size of plan)"
        reject("ckv_cache.shape[1]", rule, ckv_cache.shape[1])
    rope_shape = (tokens, heads, settings.head_dim_kpe)
    require_shape(q_pe, "q_pe", (rope_shape,), "tokens, num_heads, head_dim_kpe of plan")
    if settings.head_dim_kpe == 0:
        rule = "0 (head_dim_kpe of plan)"
        require(kpe_cache.shape[2] == 0, "kpe_cache.shape[2]", rule, kpe_cache.shape[2])
