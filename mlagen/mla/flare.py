"""MLA decode with the signature of Modular's ``flare_mla_decoding`` and all of its masks."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, cast

import torch

from mlagen.entry_point import ALL, OUT, entry_point
from mlagen.families.common.arguments import (
    INT32_MAX,
    chooses_batch_invariant,
    reject,
    require,
    require_contiguous,
    require_device,
    require_dims,
    require_dtype,
    require_flag,
    require_shape,
    require_tensor,
    require_whole_number,
)
from mlagen.families.common.launchers import Computed
from mlagen.families.common.memory import require_memory
from mlagen.families.dispatch import MLA
from mlagen.families.mla.args import MlaArgs, canonical_numbers
from mlagen.families.mla.problem import check_problem
from mlagen.families.workspace import call_workspace_bytes, max_workspace_bytes
from mlagen.mla.flare_operands import (
    Keys,
    PagedKVCache,
    Queries,
    as_int32,
    compute_padded,
    compute_ragged,
    dense_keys,
    keys_without_table,
    padded_queries,
    paged_keys,
    positions_of,
    ragged_queries,
)
from mlagen.mla.masks import CausalMask, Mask, NullMask, code_of, empty_bias, mask_of
from mlagen.observe.observed import is_observed, observe
from mlagen.settings import current_settings
from mlagen.torch_ops.outputs import mla_dtype
from mlagen.torch_ops.traced import Op, Shape, as_op, define_ops, is_compiling, is_traced

__all__ = ["PagedKVCache", "flare_mla_decoding"]

_LATENT_DIM, _ROPE_DIM = 512, 64

_CACHE = ("block_table", "cache_lengths", "k_scales")  # of a paged cache, in the op

# The masks that are not materialized, by whether they are causal.
_UNBIASED = (NullMask, CausalMask)

# Larger block tables and masks cost more than a separate check of the call without them, which
# comes first then.
_MAX_UNCHECKED = 1 << 16

# A call whose arguments are those of the family, and its requested outputs.
run_mla = entry_point(MLA, outputs="out lse", returns=ALL, ignored="names")(MlaArgs)


class FlareCall(NamedTuple):
    """The arguments of a call."""

    q: torch.Tensor
    k: torch.Tensor | PagedKVCache
    mask: Mask
    valid_length: torch.Tensor | None
    scale: float | torch.Tensor
    output: torch.Tensor | None
    ragged: bool
    num_partitions: int | None
    q_scale: torch.Tensor | None
    per_token_scale_rope_aware: bool
    kv_scales: torch.Tensor | None
    batch_invariant: bool | None


def flare_mla_decoding(
    q: torch.Tensor,
    k: torch.Tensor | PagedKVCache,
    mask: Mask,
    valid_length: torch.Tensor | None,
    scale: float,
    *,
    output: torch.Tensor | None = None,
    ragged: bool = False,
    num_partitions: int | None = None,
    q_scale: torch.Tensor | None = None,
    per_token_scale_rope_aware: bool = False,
    kv_scales: torch.Tensor | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """Decode the new tokens of every request against all its tokens.

    Fully masked rows and padding rows give zeros. Masks other than :class:`NullMask` and
    :class:`CausalMask` are materialized, with 4 bytes for every query token and every position of
    the block table's capacity, shared by the heads. The call does not synchronize with the device.
    Invalid lengths in ``k.cache_lengths``, or in ``valid_length`` of padded requests, are clamped,
    and rejected with ``MLAGEN_CHECK=1``. Tensors on the CPU use a slow PyTorch backend.

    Parameters
    ----------
    q : bf16, fp16 or e4m3 [batch, q_len, heads, 576], or [tokens, heads, 576] if ragged
        Absorbed queries, latent part first. 1 to 256 heads. With ``per_token_scale_rope_aware``
        640-byte rows, e4m3 or uint8: 512 e4m3 elements and 64 of bf16.
    k : PagedKVCache, or as q [batch, num_keys, 1, 576]
        The tokens of each request; the first 512 elements of a token are also its value. In the
        dense layout the new tokens are the last of ``num_keys``, and each call builds a block table
        for it.
    mask : Mask
        The tokens that a query token attends to; see :mod:`mlagen.mla.masks`.
    valid_length : int32 or uint32 [batch]
        The valid tokens of ``q_len`` in each request; the others are padding. None means all of
        them, for dense ``k`` only. If ``ragged``, the offsets ``[batch + 1]`` of the requests.
    scale : float
        Multiplies the scores before the mask; no other factor applies. Natural domain.
    output : [..., heads, 512]
        Written and returned, contiguous; allocated if None. Of the query's dtype, bf16 for e4m3.
    ragged : bool
        Whether the query has no padding.
    num_partitions : int
        Ignored; a hint for the number of KV splits, 1 or more.
    q_scale : fp32 [tokens]
        The scale of each query token, with ``per_token_scale_rope_aware``; None means 1. With
        padding ``[batch, q_len]`` too.
    per_token_scale_rope_aware : bool
        Whether rows have 640 bytes, with a scale for each token that multiplies its rope part
        and its value too.
    kv_scales : fp32 [batch, num_keys], or with trailing axes of size 1
        The scales of dense ``k``.
    batch_invariant : bool
        Whether the bits of a request's results must not depend on the rest of the batch; None means
        what ``MLAGEN_BATCH_INVARIANT`` says.

    Returns
    -------
    torch.Tensor
        ``output``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; no kernel is launched, and the outputs are unchanged.
    UnsupportedError
        If no kernel supports the dtypes.
    CaptureError
        If the kernel is not loaded yet during CUDA graph capture.

    Notes
    -----
    Signature of ``flare_mla_decoding`` in Modular's ``nn.mla``, without its context, scalar buffer
    and unused offsets.
    """
    words = (per_token_scale_rope_aware, kv_scales, batch_invariant)
    others: Any = (output, ragged, num_partitions, q_scale, *words)
    if is_compiling() or is_traced():
        return _call_op(q, k, mask, valid_length, scale, *others)
    if current_settings().observes_calls and not is_observed():
        given = FlareCall(q, k, mask, valid_length, scale, *others)._asdict()
        return cast("torch.Tensor", observe(flare_mla_decoding, given))
    if isinstance(k, PagedKVCache) and mask.__class__ in _UNBIASED:
        cache = (k.blocks, k.block_table, k.cache_lengths, valid_length, k.scales)
        return _decode_paged(q, *cache, mask.__class__ is CausalMask, scale, *others)
    args, _ = _args_of(FlareCall(q, k, mask, valid_length, scale, *others))
    (result,) = run_mla(*args)
    return result if output is None else output


@entry_point(MLA, outputs="output", returns=OUT)
def _decode_paged(
    q: torch.Tensor,
    blocks: torch.Tensor,
    block_table: torch.Tensor,
    cache_lengths: torch.Tensor,
    valid_length: torch.Tensor | None,  # before the scales: ``computed_of`` reads the first five
    scales: torch.Tensor | None,
    is_causal: bool,
    scale: float | torch.Tensor,
    output: torch.Tensor | None = None,
    ragged: bool = False,
    num_partitions: int | None = None,
    q_scale: torch.Tensor | None = None,
    per_token_scale_rope_aware: bool = False,
    kv_scales: torch.Tensor | None = None,
    batch_invariant: bool | None = None,
) -> MlaArgs:
    """Return the arguments of a call over a paged cache with a mask that is not materialized."""
    k, mask = PagedKVCache(blocks, block_table, cache_lengths, scales), _UNBIASED[is_causal]()
    words = (per_token_scale_rope_aware, kv_scales, batch_invariant)
    others = (output, ragged, num_partitions, q_scale, *words)
    args, queries = _args_of(FlareCall(q, k, mask, valid_length, scale, *others))
    size = args.workspace_buffer.numel()
    compute = compute_ragged if ragged else compute_padded

    def computed_of(
        q: torch.Tensor,
        blocks: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        valid: torch.Tensor,
        *_: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        keys = Keys(blocks=blocks, block_table=table, cached=as_int32(lengths))
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
        return (*compute(q, keys, as_int32(valid)).computed, workspace)

    computed = Computed((*queries.computed, args.workspace_buffer), computed_of)
    return args._replace(computed=computed)


def _define_op() -> None:
    """Define the op of the entry point, with cache and mask as tensors and a word."""

    def entry(**given: Any) -> torch.Tensor:
        k, table, lengths, scales = (given.pop(name) for name in ("k", *_CACHE))
        tensors = given.pop("mask_tensors")
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given["mask"] = mask_of(given["mask"], tensors)
        keys = k if table is None else PagedKVCache(k, table, lengths, scales)
        return flare_mla_decoding(k=keys, **given)

    own = inspect.signature(flare_mla_decoding).parameters
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    types = {"k": "torch.Tensor", **dict.fromkeys(_CACHE, "torch.Tensor | None"), "mask": "str"}
    parts = {"q": "torch.Tensor", **types, "mask_tensors": "list[torch.Tensor]"}
    parameters = [inspect.Parameter(name, kind, annotation=part) for name, part in parts.items()]
    others = [parameter.replace(kind=kind) for name, parameter in own.items() if name not in parts]
    vars(entry)["__signature__"] = inspect.Signature([*parameters, *others])
    entry.__name__ = flare_mla_decoding.__name__
    define_ops(entry, Op(output=_output))


def _output(given: dict[str, Any]) -> Shape:
    query = given["q"]
    return (*query.shape[:-1], _LATENT_DIM), mla_dtype(query)


def _call_op(
    q: torch.Tensor, k: torch.Tensor | PagedKVCache, mask: Mask, *others: Any
) -> torch.Tensor:
    """Return the result of the entry point, computed by its op; a compiler traces this."""
    tensors: list[torch.Tensor] = []
    if not isinstance(mask, Mask):
        reject("mask", "a mask of mlagen.mla", type(mask).__name__)
    code = code_of(mask, tensors)
    parts: tuple[Any, ...] = (k, None, None, None)
    if isinstance(k, PagedKVCache):
        parts = (k.blocks, k.block_table, k.cache_lengths, k.scales)
    result: torch.Tensor = as_op("flare_mla_decoding", q, *parts, code, tensors, *others)
    return result


_define_op()


def _args_of(call: FlareCall) -> tuple[MlaArgs, Queries]:
    """Return the arguments of a call, after the checks that are not those of all MLA calls."""
    q, k, mask, output = call.q, call.k, call.mask, call.output
    ragged, name = require_flag(call.ragged, "ragged"), "per_token_scale_rope_aware"
    is_fp8_per_token = require_flag(call.per_token_scale_rope_aware, name)
    _check_memory(**call._asdict())
    require_dims(require_tensor(q, "q"), "q", (3,) if ragged else (4,))
    require(isinstance(mask, Mask), "mask", "a mask of mlagen.mla", type(mask).__name__)
    if call.num_partitions is not None:
        require_whole_number(call.num_partitions, "num_partitions", min_value=1)
    if output is not None:
        require_shape(require_tensor(output, "output"), "output", ((*q.shape[:-1], _LATENT_DIM),))
        require_contiguous(output, "output")

    def args_of(keys: Keys, *, is_layout_check: bool) -> tuple[MlaArgs, Queries]:
        require_device(keys.blocks, keys.names.kv_cache, q.device)
        if is_fp8_per_token and keys.scales is None:
            reject(keys.names.kv_scales, "a tensor with per_token_scale_rope_aware", None)
        needs_rows = not isinstance(mask, _UNBIASED)
        make_queries = ragged_queries if ragged else padded_queries
        has_rows = needs_rows and not is_layout_check
        queries = make_queries(q, keys, call.valid_length, needs_rows=has_rows)
        bias = None if queries.rows is None else mask.bias(queries.rows)
        if needs_rows and is_layout_check:
            bias = empty_bias(mask, q, keys.block_table.shape[0])
        args = MlaArgs(
            query=queries.query,
            kv_cache=keys.blocks,
            workspace_buffer=_workspace(q.device),
            kv_lora_rank=_LATENT_DIM,
            qk_rope_head_dim=_ROPE_DIM,
            block_tables=queries.block_table,
            seq_lens=queries.seq_lens,
            max_seq_len=0 if is_layout_check else min(keys.width, INT32_MAX),
            out=None if output is None else output.view(*queries.query.shape[:-1], _LATENT_DIM),
            bmm1_scale=call.scale,
            cum_seq_lens_q=queries.cu_seqlens_q,
            max_q_len=queries.max_q_len,
            is_causal=isinstance(mask, CausalMask),
            query_scales=None if call.q_scale is None else _flat_scales(call.q_scale),
            kv_scales=keys.scales,
            bias=bias,
            is_fp8_per_token=is_fp8_per_token,
            out_shape=(*q.shape[:-1], _LATENT_DIM),
            batch_invariant=chooses_batch_invariant(call.batch_invariant),
            names=keys.names,
        )
        return args, queries

    if positions_of(k) > _MAX_UNCHECKED:
        args_to_check, _ = args_of(keys_without_table(k, call.kv_scales), is_layout_check=True)
        check_problem(canonical_numbers(args_to_check))
    keys_of: Any = paged_keys if isinstance(k, PagedKVCache) else dense_keys
    keys = keys_of(k, call.kv_scales)
    args, queries = args_of(keys, is_layout_check=False)
    if args.batch_invariant and q.is_cuda:  # no bound holds for all of these
        size = max(args.workspace_buffer.numel(), call_workspace_bytes(MLA.family, args))
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
        args = args._replace(workspace_buffer=workspace)
    return args, queries


def _check_memory(**arguments: object) -> None:
    """Reject tensors that are not in memory, also in caches and masks, before any computation."""
    for name, argument in arguments.items():
        require_memory(argument, name)
        if isinstance(argument, (PagedKVCache, Mask)):
            _check_memory(**{f"{name}.{field}": part for field, part in vars(argument).items()})


def _flat_scales(q_scale: torch.Tensor) -> torch.Tensor:
    scales = require_tensor(q_scale, "q_scale")
    require_dtype(scales, "q_scale", (torch.float32,))
    require_contiguous(scales, "q_scale")
    return scales.flatten()


def _workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(max_workspace_bytes(device), dtype=torch.uint8, device=device)
