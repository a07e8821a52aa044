"""Runs of a BatchMLA plan: checks of the tensors against the plan, and the MLA call."""

from __future__ import annotations

import torch

from mlagen.errors import CaptureError
from mlagen.families.common.arguments import (
    reject,
    require,
    require_dims,
    require_shape,
    require_tensor,
)
from mlagen.families.common.memory import require_memory, require_plain, require_writable
from mlagen.families.mla.args import MlaArgNames, MlaArgs
from mlagen.families.mla.dispatch import run_mla
from mlagen.mla.batch_plan import BatchPlan
from mlagen.mla.kv_scales import check_kv_scales, require_tensor_spec
from mlagen.runtime.capture import is_capturing

_NAMES = MlaArgNames(
    query="q_nope",
    query_rope="q_pe",
    kv_cache="ckv_cache",
    rope_cache="kpe_cache",
    kv_scales="ckv_scale_arr",
    workspace_buffer="float_workspace_buffer",
    block_tables="kv_indices",
    kv_indptr="kv_indptr",
    seq_lens="kv_len_arr",
    cum_seq_lens_q="qo_indptr",
    bmm1_scale="sm_scale",
)


def reject_capture(device: torch.device) -> None:
    """Reject CUDA graph capture of a run without graph buffers.

    Raises
    ------
    CaptureError
        During capture: replays would read metadata that the next plan frees.
    """
    if is_capturing(device):
        raise CaptureError(
            "use_cuda_graph: expected True with its four buffers while a CUDA graph is captured, "
            "since replays read metadata that the next plan frees, got False"
        )


def run_planned(
    workspace: torch.Tensor,
    plan: BatchPlan,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    *,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    lse_base: str,
    ckv_scale: float | None,
    ckv_scale_arr: torch.Tensor | None,
    kpe_scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output, and the LSE if one is given or requested.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule or differs from the plan; the outputs are unchanged then.
    """
    _check_as_planned(plan, q_nope, q_pe, ckv_cache, kpe_cache)
    latent_scale, rope_scale = check_kv_scales(
        ckv_cache,
        is_dequantised=plan.settings.is_dequantised,
        ckv_scale=ckv_scale,
        ckv_scale_arr=ckv_scale_arr,
        kpe_scale=kpe_scale,
    )
    shape, device = tuple(q_nope.shape), q_nope.device
    if out is not None:
        require_tensor_spec(out, "out", shape=shape, dtype=q_nope.dtype, device=device)
        # The MLA call checks a plain contiguous output itself, as a view.
        if out.__class__ is not torch.Tensor or out.requires_grad or not out.is_contiguous():
            require_memory(out, "out")
            require_writable(out, "out")
    if lse is not None:
        require_tensor_spec(lse, "lse", shape=shape[:2], dtype=torch.float32, device=device)
    settings, layout, metadata = plan.settings, plan.layout, plan.metadata
    query, rope = q_nope, q_pe
    is_uniform = metadata.q_len > 0 and metadata.tokens == shape[0]
    if is_uniform:  # CTAs need no search for the request of a token
        grouped = (layout.batch, metadata.q_len, settings.num_heads)
        try:
            query, rope = query.view(*grouped, query.shape[-1]), rope.view(*grouped, rope.shape[-1])
        except RuntimeError:  # freed storage
            require_memory(q_nope, "q_nope")
            require_memory(q_pe, "q_pe")
            raise
    has_rope = settings.head_dim_kpe > 0
    # The kernels write contiguous rows.
    target = out.view(query.shape) if out is not None and out.is_contiguous() else None
    args = MlaArgs(
        query=query,
        kv_cache=ckv_cache,
        workspace_buffer=workspace,
        kv_lora_rank=settings.head_dim_ckv,
        qk_rope_head_dim=settings.head_dim_kpe,
        block_tables=layout.kv_indices,
        seq_lens=layout.kv_len_arr,
        max_seq_len=metadata.max_kv_len,
        out=target,
        bmm1_scale=settings.sm_scale,
        lse=lse,
        return_lse=return_lse or lse is not None,
        return_lse_base=lse_base,
        cum_seq_lens_q=None if is_uniform else layout.qo_indptr,
        max_q_len=None if is_uniform else metadata.max_q_len,
        is_causal=settings.causal,
        query_rope=rope if has_rope else None,
        rope_cache=kpe_cache if has_rope else None,
        kv_scales=ckv_scale_arr,
        latent_scale=latent_scale,
        rope_scale=rope_scale,
        kv_indptr=layout.kv_indptr,
        names=_NAMES,
    )
    result, result_lse = run_mla(args, enable_pdl=True)
    if out is None:
        return result.view(shape), result_lse
    if target is None:
        out.copy_(result.view(shape))
    return out, result_lse


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
            reject(f"{name}.dtype", f"{dtype} ({planned} of plan)", tensor.dtype)
        require_plain(tensor, name)
        require_dims(tensor, name, (3,))
    tokens, heads = q_nope.shape[:2]
    if heads != settings.num_heads:
        reject("q_nope.shape[1]", f"{settings.num_heads} (num_heads of plan)", heads)
    if ckv_cache.shape[1] != settings.page_size:
        rule = f"{settings.page_size} (page_size of plan)"
        reject("ckv_cache.shape[1]", rule, ckv_cache.shape[1])
    if q_pe.shape[2] != settings.head_dim_kpe:
        reject("q_pe.shape[2]", f"{settings.head_dim_kpe} (head_dim_kpe of plan)", q_pe.shape[2])
    if settings.head_dim_kpe == 0:
        require_shape(q_pe, "q_pe", ((tokens, heads, 0),))
        rule = "0 (head_dim_kpe of plan)"
        require(kpe_cache.shape[2] == 0, "kpe_cache.shape[2]", rule, kpe_cache.shape[2])
    if metadata.tokens is not None and tokens < metadata.tokens:
        reject("q_nope.shape[0]", f"{metadata.tokens} (qo_indptr[-1]) or more", tokens)
    if plan.layout.batch == 0:
        require(tokens == 0, "q_nope.shape[0]", "0 (no requests were planned)", tokens)
