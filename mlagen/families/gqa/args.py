"""The arguments of one grouped-query call, common to all entry points."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from mlagen.families.common.arguments import (
    canonical_scale,
    reject,
    require_choice,
    require_flag,
    require_float32,
    require_tensor,
    require_whole_number,
)
from mlagen.families.common.launchers import LSE_FACTORS, Computed
from mlagen.families.common.memory import require_memory

LAYOUTS = ("NHD", "HND")


class GqaArgNames(NamedTuple):
    """The entry point's parameter names, for messages."""

    query: str = "query"
    kv_cache: str = "kv_cache"  # if one tensor holds K and V
    key_cache: str = "kv_cache[0]"
    value_cache: str = "kv_cache[1]"
    kv_scales: str = "kv_cache_sf"  # if one tensor holds K and V scales
    key_scales: str = "kv_cache_sf[0]"
    value_scales: str = "kv_cache_sf[1]"
    workspace_buffer: str = "workspace_buffer"
    block_tables: str = "block_tables"
    block_indices: str = "block_indices"
    token_to_req: str = "token_to_req"  # noqa: S105 - no secret
    output_gate: str = "output_gate"
    kv_indptr: str = "kv_indptr"
    seq_lens: str = "seq_lens"
    max_seq_len: str = "max_seq_len"
    q_len: str = "q_len_per_req"
    cum_seq_lens_q: str = "q_cu_seq_lens"
    mask: str = "mask"
    sinks: str = "sinks"
    out: str = "out"
    lse: str = "lse"
    return_lse_base: str = "return_lse_base"
    window: str = "window_left"
    bmm1_scale: str = "bmm1_scale"
    bmm2_scale: str = "bmm2_scale"


class GqaArgs(NamedTuple):
    """The arguments of a call in one layout for all entry points.

    The caches and scales are not split: a view of one part costs more than a launch.
    """

    query: torch.Tensor  # [tokens, heads, head_dim], or, with_beam_axis, [batch, 1, q_len, ...]
    key_cache: torch.Tensor  # four dimensions; five if it holds K and V
    value_cache: torch.Tensor | None  # None: in key_cache, an axis of 2, or of 1 where K is V
    workspace_buffer: torch.Tensor
    # [batch, max_pages], or flat with kv_indptr; None: block_indices are tokens of the cache
    block_tables: torch.Tensor | None
    # [batch] or [batch, 1], including the new tokens; None: all that the block tables cover
    seq_lens: torch.Tensor | None
    max_seq_len: int
    # [batch + 1]: where the page ids of requests start; a plan has checked it against seq_lens.
    kv_indptr: torch.Tensor | None = None
    q_len: int = 1  # of every request, or the maximum with cum_seq_lens_q
    kv_layout: str = "NHD"
    window: int = 0  # tokens that a row attends to, including itself; 0: no limit
    soft_cap: float = 0.0  # of the scores; 0: none
    out: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None  # of a new output; None: that of the query
    is_out_like_query: bool = False  # a new output has the shape of the query
    lse: torch.Tensor | None = None
    return_lse: bool = False
    return_lse_base: str = "base2"
    bmm1_scale: float | torch.Tensor = 1.0
    bmm2_scale: float | torch.Tensor = 1.0
    out_16bit_factor: float = 1.0  # multiplies an output of 16 bits
    out_e4m3_factor: float = 1.0  # multiplies an output of e4m3
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None  # packed tree mask of draft tokens
    is_causal: bool = True  # without a mask
    cum_seq_lens_q: torch.Tensor | None = None
    # int32 [batch], in decode context parallel: tokens of all ranks before the query tokens
    causal_seqlens_kv_global: torch.Tensor | None = None
    cp_world: int = 1
    cp_rank: int = 0
    separate_page_ids: bool = False  # block_tables are [batch, 2, max_pages], keys' and values'
    has_head_tables: bool = False  # block_tables and seq_lens begin with an axis of the KV heads
    # Of a sparse call: KV blocks that each query token attends to, int32 [kv_heads, tokens, n], or
    # [tokens, n] for all KV heads, or with separate_page_ids [tokens, 2, n]. Indices outside of the
    # visible blocks are skipped.
    block_indices: torch.Tensor | None = None
    sparse_block: int = 0  # tokens of such a block
    top_k: int = 0  # n, with separate_page_ids
    has_index_counts: bool = False  # the last column is the number of indices before it
    token_to_req: torch.Tensor | None = None  # request of each query token; None: q_len of each
    output_gate: torch.Tensor | None = None  # like out: its sigmoid multiplies the rounded output
    # Of NVFP4 with the dimensions of the cache; or fp32 of each token, with one dimension less.
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    with_beam_axis: bool = False  # an axis of size 1 follows the batch in query and out
    # bmm2_scale multiplies the scores too, and is ignored with a 16-bit cache; the scores are
    # multiplied by 1 / sqrt(head_dim).
    scales_like_xqa: bool = False
    batch_invariant: bool = False  # the bits of a result do not depend on the rest of the batch
    enable_pdl: bool = True
    computed: Computed | None = None  # by the entry point at every call
    names: GqaArgNames = GqaArgNames()


def canonical_numbers(args: GqaArgs) -> GqaArgs:
    """Return the arguments with built-in Python numbers.

    Window and output factors are canonical already: the entry points compute them.
    """
    names = args.names
    return args._replace(
        max_seq_len=require_whole_number(args.max_seq_len, names.max_seq_len),
        q_len=require_whole_number(args.q_len, names.q_len, min_value=1),
        kv_layout=require_choice(args.kv_layout, "kv_layout", LAYOUTS),
        is_causal=require_flag(args.is_causal, "causal"),
        return_lse=require_flag(args.return_lse, "return_lse"),
        return_lse_base=require_choice(args.return_lse_base, names.return_lse_base, LSE_FACTORS),
        bmm1_scale=canonical_scale(args.bmm1_scale, names.bmm1_scale),
        bmm2_scale=canonical_scale(args.bmm2_scale, names.bmm2_scale),
    )


def pair_of(
    kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor] | None, argument: str
) -> tuple[Any, torch.Tensor | None]:
    """Return keys and values; the values are None where one tensor, or none, holds both."""
    if not isinstance(kv, (tuple, list)):
        return kv, None
    if len(kv) != 2:
        reject(argument, "a tensor, or two in a tuple or list", f"{len(kv)} of them")
    key, value = kv
    if key.__class__ is torch.Tensor and value.__class__ is torch.Tensor:
        return key, value
    return require_tensor(key, f"{argument}[0]"), require_tensor(value, f"{argument}[1]")


def converted_query(query: torch.Tensor, argument: str, out_dtype: torch.dtype) -> torch.Tensor:
    """Return an e4m3 query in 16 bits, which launches one small kernel; others unchanged.

    Both dtypes hold every e4m3 number, so a 16-bit output chooses.
    """
    if query.dtype is not torch.float8_e4m3fn:
        return query
    require_memory(query, argument)
    return query.to(torch.float16 if out_dtype is torch.float16 else torch.bfloat16)


def window_of(window: object, argument: str, *, has_own: bool = False) -> int:
    """Return the window: tokens that a row attends to, including itself; 0 is no limit.

    The argument is their number, or without ``has_own`` that of the tokens before the row.
    """
    number = require_whole_number(window, argument, min_value=None, max_value=None)
    return max(0, number if has_own else number + 1)


def soft_cap_of(soft_cap: object) -> float:
    """Return the soft cap of the scores; 0 is none."""
    if soft_cap is None:
        return 0.0
    number = require_float32(soft_cap, "logits_soft_cap")
    if number != 0 and not 1e-30 <= number <= 1e30:  # of its powers in fp32, none is infinite
        reject("logits_soft_cap", "None, 0, or a number from 1e-30 to 1e30", number)
    return abs(number)  # no -0.0, which no key distinguishes from 0.0


def positive_factor(number: object, argument: str) -> float:
    """Return a positive factor in the range of float32."""
    if number.__class__ is float and 1e-30 < number < 1e30:
        return number
    factor = require_float32(number, argument)
    if not 0 < factor < math.inf:
        reject(argument, "a finite number above 0", factor)
    return factor
