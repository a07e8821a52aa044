"""Runs of BatchMLA: checks against their plan, and the arguments of the kernels."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from mlagen.entry_point import ALL, entry_point
from mlagen.errors import ArgumentError
from mlagen.families.common.arguments import (
    canonical_sinks,
    reject,
    reject_dtype,
    require,
    require_contiguous,
    require_dims,
    require_flag,
    require_float32,
    require_number,
    require_shape,
    require_tensor,
    shown,
)
from mlagen.families.common.memory import (
    require_memory,
    require_plain,
    require_shaped,
    require_writable,
)
from mlagen.families.dispatch import MLA
from mlagen.families.mla.args import MlaArgNames, MlaArgs
from mlagen.mla.contract import FP8_DTYPES
from mlagen.mla.plan import DENSE_NAMES, RANK, MlaSettings, settings_of_run
from mlagen.planned.op import PlannedOp
from mlagen.planned.plan import Plan, settings_of, with_fields
from mlagen.torch_ops.outputs import mla_dtype
from mlagen.torch_ops.traced import Shape

_NAMES = MlaArgNames(
    query_rope="q_pe",
    rope_cache="kpe_cache",
    kv_scales="ckv_scale_arr",
    workspace_buffer="float_workspace_buffer",
    bmm1_scale="sm_scale",
)


class MlaRun(NamedTuple):
    """The arguments of a run."""

    q_nope: torch.Tensor
    q_pe: torch.Tensor | None
    ckv_cache: torch.Tensor
    kpe_cache: torch.Tensor | None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    return_lse: bool = False
    return_lse_base_on_e: bool = False
    ckv_scale: float | None = None
    ckv_scale_arr: torch.Tensor | None = None
    kpe_scale: float | None = None
    o_scale: float | None = None
    sinks: torch.Tensor | None = None
    skip_softmax_threshold_scale_factor: float | None = None
    bmm1_scale: float | None = None
    bmm2_scale: float | None = None


@entry_point(MLA, outputs="out lse", returns=ALL, plan="plan")
@with_fields(MlaRun)
def run_planned(
    plan: Plan[MlaSettings], float_workspace_buffer: torch.Tensor, run: MlaRun
) -> MlaArgs:
    """Return the arguments of a run, whose tensors are checked against its plan.

    A query in one tensor is ``q_nope`` without ``q_pe``, and a cache likewise. The output is
    divided by ``o_scale``.
    """
    run = run._replace(
        return_lse=require_flag(run.return_lse, "return_lse"),
        return_lse_base_on_e=require_flag(run.return_lse_base_on_e, "return_lse_base_on_e"),
    )
    settings, requests, out = plan.settings, plan.requests, run.out
    if settings.contract is not None:
        settings.contract.check(run)
    if run.skip_softmax_threshold_scale_factor is not None:
        name = "skip_softmax_threshold_scale_factor"
        require_number(run.skip_softmax_threshold_scale_factor, name)
    score_scale, out_scale = settings.sm_scale, 1.0
    if run.bmm1_scale is not None:
        score_scale = require_float32(run.bmm1_scale, "bmm1_scale")
        out_scale = require_float32(run.bmm2_scale, "bmm2_scale")
    query, rope, cache, rope_cache = run.q_nope, run.q_pe, run.ckv_cache, run.kpe_cache
    if rope is None:
        query, rope = _split(query, settings, "query")
    if rope_cache is None:
        cache, rope_cache = _split(cache, settings, "kv_cache")
    _check_as_planned(plan, query, rope, cache, rope_cache)
    latent_scale, rope_scale = _kv_scales(settings, run, cache)
    shape = tuple(query.shape)
    _check_outputs(out, run.lse, query, settings.kernel_dtype)
    has_rope = settings.head_dim_kpe > 0
    if run.q_pe is None:
        query = run.q_nope
    # CTAs then need no search for the request of a token; the tile may be another one.
    is_uniform = plan.q_len > 0 and plan.tokens == shape[0] and not settings.batch_invariant
    if is_uniform:
        grouped = (shape[0] // plan.q_len, plan.q_len, shape[1])
        try:
            query, rope = (part.view(*grouped, part.shape[-1]) for part in (query, rope))
        except RuntimeError:  # freed storage
            require_memory(run.q_nope, "q_nope")
            require_memory(run.q_pe, "q_pe")
            raise
    is_written = out is not None and out.is_contiguous()  # the kernels write contiguous rows
    return MlaArgs(
        query=query,
        kv_cache=run.ckv_cache,
        workspace_buffer=float_workspace_buffer,
        kv_lora_rank=settings.head_dim_ckv,
        qk_rope_head_dim=settings.head_dim_kpe,
        block_tables=requests.kv_indices,
        seq_lens=requests.kv_len_arr,
        max_seq_len=plan.max_kv_len,
        out=out.view(*query.shape[:-1], settings.head_dim_ckv)
        if out is not None and is_written
        else None,
        bmm1_scale=score_scale,
        bmm2_scale=out_scale if run.o_scale is None else out_scale / run.o_scale,
        sinks=canonical_sinks(run.sinks),
        lse=run.lse,
        return_lse=run.return_lse or run.lse is not None,
        return_lse_base="basee" if run.return_lse_base_on_e else "base2",
        cum_seq_lens_q=None if is_uniform else requests.qo_indptr,
        max_q_len=None if is_uniform else plan.max_q_len,
        is_causal=settings.causal,
        query_rope=rope if has_rope and run.q_pe is not None else None,
        rope_cache=rope_cache if has_rope and run.kpe_cache is not None else None,
        kv_scales=run.ckv_scale_arr,
        latent_scale=latent_scale,
        rope_scale=rope_scale,
        kv_indptr=requests.kv_indptr,
        out_shape=(*shape[:2], settings.head_dim_ckv),
        is_planned=settings.contract is not None,
        enable_pdl=settings.enable_pdl,
        batch_invariant=settings.batch_invariant,
        names=_NAMES._replace(
            query="query" if run.q_pe is None else "q_nope",
            kv_cache="kv_cache" if run.kpe_cache is None else "ckv_cache",
            block_tables=requests.name_of("kv_indices"),
            seq_lens=requests.name_of("kv_len_arr"),
            cum_seq_lens_q=requests.name_of("qo_indptr"),
        ),
    )


def _output(given: dict[str, Any]) -> Shape:
    query, text = given["q_nope"], given["plan"]
    width = settings_of(MlaSettings, text).head_dim_ckv if text else RANK
    return (*query.shape[:2], width), mla_dtype(query)


OP = PlannedOp(
    "batch_mla_run",
    run_planned,
    settings_of=settings_of_run,
    output=_output,
    names=DENSE_NAMES,
)
batch_mla_run = OP.entry


def parts_of(value: Any, name: str, *parts: Any) -> tuple[Any, Any]:
    """Return the two parts of a query or a cache; one tensor has no second part."""
    if any(part is not None for part in parts):
        reject(name, "None with its parts", "both")
    if isinstance(value, torch.Tensor):
        return value, None
    if isinstance(value, (tuple, list)) and len(value) == 2:
        whole = [part for part in value if not isinstance(part, (tuple, list))]
        if len(whole) == 2:
            return value[0], require_tensor(value[1], f"{name}[1]")
        if len(whole) == 1:  # FlashInfer's form of both
            return whole[0], None
    return reject(name, "a torch.Tensor, a pair of its parts, or a pair of both", shown(value))


def _split(
    packed: torch.Tensor, settings: MlaSettings, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latent and the rope part of a query or a cache in one tensor, as views."""
    require_plain(require_tensor(packed, name), name)
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
    plan: Plan[MlaSettings],
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
) -> None:
    """Reject tensors that differ from the plan."""
    settings = plan.settings
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
    if plan.tokens is not None and tokens < plan.tokens:
        reject("q_nope.shape[0]", f"{plan.tokens} (qo_indptr[-1]) or more", tokens)
    if plan.requests.batch == 0:
        require(tokens == 0, "q_nope.shape[0]", "0 (no requests were planned)", tokens)
    if ckv_cache.shape[1] != settings.page_size:
        rule = f"{settings.page_size} (page_size of plan)"
        reject("ckv_cache.shape[1]", rule, ckv_cache.shape[1])
    rope_shape = (tokens, heads, settings.head_dim_kpe)
    require_shape(q_pe, "q_pe", (rope_shape,), "tokens, num_heads, head_dim_kpe of plan")
    if settings.head_dim_kpe == 0:
        rule = "0 (head_dim_kpe of plan)"
        require(kpe_cache.shape[2] == 0, "kpe_cache.shape[2]", rule, kpe_cache.shape[2])


def _check_outputs(
    out: torch.Tensor | None, lse: torch.Tensor | None, q_nope: torch.Tensor, dtype: torch.dtype
) -> None:
    """Reject outputs of a run that differ from its query in shape or device."""
    shape, device = tuple(q_nope.shape), q_nope.device
    if out is not None:
        _require_tensor_spec(out, "out", shape, dtype, device)
        # The MLA call checks a plain contiguous output itself, as a view.
        if out.__class__ is not torch.Tensor or out.requires_grad or not out.is_contiguous():
            require_memory(out, "out")
            require_writable(out, "out")
    if lse is not None:
        _require_tensor_spec(lse, "lse", shape[:2], torch.float32, device)


def _require_tensor_spec(
    tensor: object, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a tensor with the given shape, dtype and device; messages are FlashInfer's."""
    known = require_tensor(tensor, name)
    require_shaped(known, name)
    require(known.shape == shape, f"Invalid shape of {name}", list(shape), list(known.shape))
    require(known.dtype is dtype, f"Invalid dtype of {name}", dtype, known.dtype)
    require(known.device == device, f"Invalid device of {name}", device, known.device)
    return known


def require_positive(scale: object, argument: str) -> float:
    """Return ``scale`` if it is a finite float32 number above 0."""
    subject, rule = f"{argument} must be a finite positive value", "a float above 0"
    number = require_float32(scale, subject, rule)
    if not 0 < number < math.inf:
        reject(subject, rule, number)
    return number


def _kv_scales(settings: MlaSettings, run: MlaRun, ckv_cache: torch.Tensor) -> tuple[float, float]:
    """Return the scales of latent and rope elements; the former is 1 with ``ckv_scale_arr``."""
    has = [scale is not None for scale in (run.ckv_scale, run.ckv_scale_arr, run.kpe_scale)]
    contract = settings.contract
    if contract is None or contract.scale_mode != "kv-per-tensor":
        if any(has):
            why = "only valid when kv_data_type is torch.float8_e4m3fn, expected None"
            if ckv_cache.dtype is torch.float8_e4m3fn:
                why = "expected None without scale_mode kv-per-tensor"
            raise ArgumentError(
                f"ckv_scale, ckv_scale_arr, kpe_scale: {why}, got a cache of {ckv_cache.dtype}"
            )
        return 1.0, 1.0
    if has[0] == has[1]:
        raise ArgumentError(
            "Exactly one of ckv_scale or ckv_scale_arr: expected for an e4m3 cache, got "
            f"{'both' if has[0] else 'none'}"
        )
    if run.kpe_scale is None:
        raise ArgumentError("kpe_scale is required: expected a float for an e4m3 cache, got None")
    rope_scale = require_positive(run.kpe_scale, "kpe_scale")
    if run.ckv_scale_arr is None:
        return require_positive(run.ckv_scale, "ckv_scale"), rope_scale
    shape, device = (*ckv_cache.shape[:-1], 4), ckv_cache.device
    scales = _require_tensor_spec(run.ckv_scale_arr, "ckv_scale_arr", shape, torch.float32, device)
    require_contiguous(scales, "ckv_scale_arr")
    return 1.0, rope_scale


def checked_fp8_out(
    out: torch.Tensor | None, q_nope: torch.Tensor, width: int, *, has_memory: bool
) -> torch.Tensor:
    """Return an output for results that are divided by a scale."""
    require_tensor(q_nope, "q_nope")
    if has_memory:
        require_plain(q_nope, "q_nope")
    if out is None:
        raise ArgumentError("out tensor must be provided when o_scale is given, got None")
    if require_tensor(out, "out").dtype not in FP8_DTYPES:
        rule = " or ".join(map(str, FP8_DTYPES))
        raise ArgumentError(
            f"out must be an FP8 tensor when o_scale is given, expected {rule}, got {out.dtype}"
        )
    if has_memory:
        require_memory(out, "out")
        require_writable(out, "out")
    return _require_tensor_spec(out, "out", (*q_nope.shape[:2], width), out.dtype, q_nope.device)


def saturated_into(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Copy results to an FP8 output, the nearest number of its dtype for each, and return it."""
    limit = torch.finfo(out.dtype).max  # larger values convert to NaN or infinity
    return out.copy_(result.clamp(-limit, limit))
