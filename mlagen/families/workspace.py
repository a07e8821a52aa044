"""The ``workspace_buffer`` size of a call, for every kernel family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import torch

from mlagen.families.common.arguments import (
    DTYPES,
    FLOAT_DTYPES,
    INT32_MAX,
    chooses_batch_invariant,
    reject,
    reject_dtype,
    require,
    require_whole_number,
    shown,
)
from mlagen.families.common.dispatch import Family
from mlagen.families.common.launchers import rounded_up
from mlagen.families.common.plan_sm80 import max_sm80_bytes_per_sm, plan_sm80_call
from mlagen.families.common.problem import LaunchPlan, ProblemShape
from mlagen.families.gqa import launch as gqa_launch
from mlagen.families.gqa.args import window_of
from mlagen.families.gqa.plan import (
    attended_tokens,
    gqa_sm90_bytes_per_cta,
    plan_gqa_sm90_call,
)
from mlagen.families.gqa.problem import QUANTIZED, WITH_TOKEN_SCALES
from mlagen.families.mla.launch import not_covered
from mlagen.families.mla.plan import mla_sm90_bytes_per_cta, plan_mla_sm90_call
from mlagen.families.mla.problem import KV_DTYPES
from mlagen.families.mla.two_pools import kv_format_of
from mlagen.runtime.device import arch_of_device, device_facts
from mlagen.settings import current_settings
from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.families import specs_of
from mlagen.spec.gqa.sm80 import TILES as GQA_TILES
from mlagen.spec.gqa.sm90 import GqaSm90Spec
from mlagen.spec.gqa.variant import SLICE_DIMS, GqaVariant
from mlagen.spec.mla.sm80 import TILES as MLA_TILES
from mlagen.spec.mla.sm90 import MLA_SM90, MlaSm90Spec
from mlagen.spec.mla.variant import SUPPORTED, MlaVariant

_GQA_KV_DTYPES = {**DTYPES, **QUANTIZED}


def workspace_bytes(
    *,
    batch: int,
    q_len: int,
    heads: int,
    max_seq_len: int,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    page_size: int = 64,
    sparse_mla_top_k: int = 0,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    head_dim_vo: int | None = None,
    window_left: int = -1,
    kv_cache_format: str | None = None,
    tokens: int | None = None,
    batch_invariant: bool | None = None,
    device: torch.device | int | str = 0,
) -> int:
    """Return the bytes of ``workspace_buffer`` that a decode call of this size needs.

    A call uses the end of a larger buffer, at a multiple of 128 bytes from its base address. A
    larger batch may need fewer bytes. The bytes suffice for every call of this size, by any kernel:
    those of batch-invariant calls that take an sm80 kernel grow with batch, rows and length, and
    all other calls need no more than :func:`mlagen.max_workspace_bytes`.

    Parameters
    ----------
    batch, q_len, heads, max_seq_len : int
        As in the call; for ragged queries ``q_len`` is the maximum. For calls without a
        ``max_seq_len`` (``xqa``, ``xqa_mla``, and runs without a plan) it is the width of the block
        table times ``page_size``.
    dtype : torch.dtype
        Of the query.
    kv_dtype : torch.dtype
        Of the cache, as ``dtype`` if None; uint8 is fp8_ds_mla, and in grouped-query attention
        NVFP4.
    kv_lora_rank : int
        As in the call, for multi-head latent attention.
    qk_rope_head_dim : int
        As in the call, for multi-head latent attention.
    page_size : int
        Of the cache.
    sparse_mla_top_k : int
        As in the call; with ``kv_cache_format`` the top-k indices into both pools.
    kv_heads, head_dim : int
        With both, the call is grouped-query attention.
    head_dim_vo : int
        Elements of a value, in grouped-query attention; ``head_dim`` if None.
    window_left : int
        As in the call, for grouped-query attention.
    kv_cache_format : str
        As in the call, for ``trtllm_batch_decode_sparse_mla_dsv4``: then the dims, ``page_size``,
        ``kv_dtype`` and ``max_seq_len`` do not matter.
    tokens : int
        The query tokens of all requests, for ragged queries.
    batch_invariant : bool
        As in the call.
    device : torch.device, int or str
        The GPU that runs the call; ``cuda`` is torch's current one.

    Raises
    ------
    ArgumentError
        If a number is out of range, or there is no such GPU.
    UnsupportedError
        If no kernel supports such a call.
    """
    batch = require_whole_number(batch, "batch")
    max_seq_len = require_whole_number(max_seq_len, "max_seq_len")
    q_len = require_whole_number(q_len, "q_len", min_value=1)
    heads = require_whole_number(heads, "heads", min_value=1)
    page_size = require_whole_number(page_size, "page_size", min_value=1)
    top_k = require_whole_number(sparse_mla_top_k, "sparse_mla_top_k")
    window = window_of(window_left, "window_left")
    total = batch * q_len if tokens is None else require_whole_number(tokens, "tokens")
    # The kernels count rows in 32 bits.
    require(total * heads <= INT32_MAX, "tokens * heads", f"{INT32_MAX} or less", total * heads)
    index = _gpu_index(device)
    kv_format = None if kv_cache_format is None else kv_format_of(kv_cache_format)
    if kv_format is not None:
        require(top_k >= 1, "sparse_mla_top_k", "1 or more with kv_cache_format", top_k)
    is_invariant = chooses_batch_invariant(batch_invariant)
    lengths = _tile_lengths(batch, q_len, tokens, is_invariant=is_invariant)
    shapes = [
        ProblemShape(
            batch=batch,
            q_len=length if tokens is None else 0,
            tile_q_len=length,
            heads=heads,
            total_rows=total * heads,
            max_kv_len=rounded_up(top_k or max_seq_len),
        )
        for length in lengths
    ]
    plans: list[LaunchPlan] = []
    if kv_heads is None and head_dim is None:
        shared = MlaVariant(
            query_dtype=_named(dtype, "dtype", FLOAT_DTYPES),
            kv_dtype=_named(dtype if kv_dtype is None else kv_dtype, "kv_dtype", KV_DTYPES),
            kv_lora_rank=require_whole_number(kv_lora_rank, "kv_lora_rank"),
            qk_rope_head_dim=require_whole_number(qk_rope_head_dim, "qk_rope_head_dim"),
            page_size=page_size,
            lookup="sparse" if top_k else "paged",
            batch_invariant=is_invariant,
        )
        if kv_format is not None:
            shared = replace(shared, kv_dtype=kv_format, lookup="two_pools", page_size=0)
            shared = replace(shared, kv_lora_rank=512, qk_rope_head_dim=0)
        separate = replace(shared, values="separate")  # may have another tile
        is_known = any(row.covers(separate) for row in SUPPORTED)
        for variant, shape in product((shared, separate) if is_known else (shared,), shapes):
            plans += _mla_plans(index, variant, shape.per_token() if top_k else shape)
        if not plans:  # the settings force a kernel that does not support the call
            raise not_covered(index, shared)
    else:
        required = {"kv_heads": (kv_heads, "head_dim"), "head_dim": (head_dim, "kv_heads")}
        for name, (value, other) in required.items():
            require(value is not None, name, f"an int, required with {other}", "None")
        kv_heads = require_whole_number(kv_heads, "kv_heads", min_value=1)
        require(heads % kv_heads == 0, "heads", f"a multiple of {kv_heads} (kv_heads)", heads)
        query_dtype = _named(dtype, "dtype", DTYPES)
        dims = require_whole_number(head_dim, "head_dim", min_value=1)
        values = dims if head_dim_vo is None else head_dim_vo
        gqa_variant = GqaVariant(
            query_dtype=query_dtype,
            kv_dtype=_named(dtype if kv_dtype is None else kv_dtype, "kv_dtype", _GQA_KV_DTYPES),
            out_dtype=query_dtype,
            head_dim=dims,
            head_dim_vo=require_whole_number(values, "head_dim_vo", min_value=1),
            page_size=page_size,
            batch_invariant=is_invariant,
        )
        attended = attended_tokens(max_seq_len, window, q_len)
        facts: dict[str, Any] = {"kv_heads": kv_heads, "max_kv_len": attended}
        facts["is_windowed"] = attended < rounded_up(max_seq_len)
        # With a scale of each token, sm80 may have another tile; only sm80 has tables of heads.
        kv = WITH_TOKEN_SCALES.get(gqa_variant.kv_dtype, gqa_variant.kv_dtype)
        others = replace(gqa_variant, kv_dtype=kv), replace(gqa_variant, has_head_tables=True)
        for possible, shape in product((gqa_variant, *others), shapes):
            plans += _gqa_plans(index, possible, replace(shape, **facts))
        if not plans:
            raise gqa_launch.not_covered(index, gqa_variant)
    return max(plan.workspace_bytes for plan in plans)


def max_workspace_bytes(device: torch.device | int | str = 0) -> int:
    """Return the ``workspace_buffer`` size that every call on a device accepts.

    For a buffer that is allocated before the calls are known. A plan has at most four waves of
    CTAs, and their partial results need at most 513 KiB for each SM: 66.1 MiB with 132 SMs.

    Batch-invariant calls that take an sm80 kernel may need more; see
    :func:`mlagen.workspace_bytes`.

    Parameters
    ----------
    device : torch.device, int or str
        The GPU that runs the calls, or a CPU; ``cuda`` is torch's current GPU.

    Returns
    -------
    int
        Bytes; 0 for a CPU.

    Raises
    ------
    ArgumentError
        If there is no such GPU.
    """
    if isinstance(device, (torch.device, str)) and _parsed(device).type == "cpu":
        return 0
    index = _gpu_index(device)
    return device_facts(index).sm_count * _max_bytes_per_sm(arch_of_device(index))


def call_workspace_bytes(family: Family, args: Any) -> int:
    """Return the bytes that suffice for a call of a GPU, whichever kernel serves it."""
    args, problem = family.validate(args)
    plans = _mla_plans if isinstance(problem.variant, MlaVariant) else _gqa_plans
    found = plans(problem.device.index, problem.variant, family.shape_of(args, problem))
    return max((plan.workspace_bytes for plan in found), default=0)


def _tile_lengths(batch: int, q_len: int, tokens: int | None, *, is_invariant: bool) -> set[int]:
    """Return the query lengths that the tile of a call may be chosen for."""
    if tokens is None:
        return {q_len}
    if is_invariant:
        return {1}
    # With its maximum query length, and without one.
    return {q_len, max(1, -(-tokens // max(1, batch)))}


@cache
def _max_bytes_per_sm(arch: Arch) -> int:
    """Return the most bytes of any plan for each SM."""
    rank = max(rank for row in SUPPORTED for rank, _ in row.head_dims)
    sm90 = specs_of(arch, [spec.family for spec in (*MLA_SM90, GqaSm90Spec)])
    return max(
        max_sm80_bytes_per_sm(MLA_TILES, rank),
        max_sm80_bytes_per_sm(GQA_TILES, SLICE_DIMS),
        # CTAs of the sm90 kernels have an SM of their own.
        *(mla_sm90_bytes_per_cta(spec) for spec in sm90 if isinstance(spec, MlaSm90Spec)),
        *(gqa_sm90_bytes_per_cta(spec) for spec in sm90 if isinstance(spec, GqaSm90Spec)),
    )


def _mla_plans(index: int, variant: MlaVariant, shape: ProblemShape) -> Iterator[LaunchPlan]:
    """Yield the possible plans of a call, for the kernels that the settings allow."""
    settings, call = current_settings(), (index, variant, shape)
    kernel, p_dtype = settings.mla_kernel, settings.mla_p_dtype
    sm90 = None if kernel == "sm80" else plan_mla_sm90_call(*call, p_dtype_choice=p_dtype)
    return _plans(kernel, sm90, call, has_one=variant.batch_invariant)


def _gqa_plans(index: int, variant: GqaVariant, shape: ProblemShape) -> Iterator[LaunchPlan]:
    """Yield the same for a call of grouped-query attention."""
    kernel, call = current_settings().gqa_kernel, (index, variant, shape)
    sm90 = None if kernel == "sm80" else plan_gqa_sm90_call(*call)
    # Only sm80 covers all places of scales of tokens.
    has_one = variant.batch_invariant and not variant.has_token_scales
    yield from _plans(kernel, sm90, call, has_one=has_one)
    if variant.has_token_scales and kernel != "sm80":
        in_rows = plan_gqa_sm90_call(*call, has_unaligned_rows=True)
        yield from () if in_rows is None else (in_rows[1],)


def _plans(
    kernel: str,
    sm90: tuple[Any, LaunchPlan] | None,
    call: tuple[int, MlaVariant | GqaVariant, ProblemShape],
    *,
    has_one: bool,
) -> Iterator[LaunchPlan]:
    """Yield both plans; with ``has_one`` no batch changes the kernel, which is sm90 if any."""
    if sm90 is not None:
        yield sm90[1]
    if kernel != "sm90" and not (sm90 is not None and has_one):
        yield plan_sm80_call(*call)[1]


def _named(dtype: torch.dtype, argument: str, known: dict[torch.dtype, DType]) -> DType:
    if not isinstance(dtype, torch.dtype) or dtype not in known:
        reject_dtype(argument, " or ".join(map(str, known)), dtype)
    return known[dtype]


def _parsed(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, ValueError):
        reject("device", "the index of a GPU or a torch.device", shown(device))


def _gpu_index(device: torch.device | int | str) -> int:
    """Return the index of a GPU, by default of torch's current one."""
    if not isinstance(device, (torch.device, str)):
        return require_whole_number(device, "device")
    known = _parsed(device)
    if known.type != "cuda":
        reject("device", "a GPU: cuda", known)
    index: int | None = known.index
    if index is None:
        is_initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return torch.cuda.current_device() if is_initialized else 0
    return index
