"""The arguments of one MLA decode call, checked and put into one form.

Nothing here looks at the contents of a tensor, so that what holds for one call holds for every
call whose arguments have the same shapes, strides, dtypes and devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from mlagen.api.arguments import (
    DTYPES,
    refuse,
    require,
    require_aligned,
    require_aligned_pointer,
    require_contiguous,
    require_dense_last_dim,
    require_device,
    require_dims,
    require_dtype,
    require_index,
    require_scale,
    require_shape,
    require_tensor,
)
from mlagen.api.mla_inputs import MlaInputs
from mlagen.errors import CaptureError, UnsupportedError
from mlagen.spec.mla import require_supported

MOST_HEADS = 256
LSE_BASES = ("base2", "basee")


@dataclass(frozen=True, kw_only=True)
class MlaRequest:
    """The layout of a sound call. Strides are in elements."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    q_len: int  # the longest
    tokens: int  # query tokens of all requests
    heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    page_size: int
    num_pages: int
    max_pages: int
    query_stride: int
    query_head_stride: int
    page_stride: int
    token_stride: int
    block_tables_stride: int
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]


def check_request(inputs: MlaInputs) -> MlaRequest:
    """Return the layout of ``inputs``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule.
    UnsupportedError
        If no kernel covers dtypes, dimensions or page size, on whatever device.
    """
    query = require_tensor(inputs.query, "query")
    is_ragged = inputs.cum_seq_lens_q is not None
    require_dims(query, "query", (3,) if is_ragged else (4,))
    _check_dtype(query, "query")
    _check_head_dim(query, "query", inputs)
    require_dense_last_dim(query, "query")
    require_aligned(query, "query")
    heads = query.shape[-2]
    require(1 <= heads <= MOST_HEADS, "query.shape[-2]", f"1 to {MOST_HEADS} heads", heads)

    cache = paged_cache(inputs)
    _check_dtype(cache, "kv_cache")
    require_dtype(cache, "kv_cache", (query.dtype,), "dtype of query")
    seq_lens = require_tensor(inputs.seq_lens, "seq_lens")
    require_index(seq_lens, "seq_lens", query.device)
    require_dims(seq_lens, "seq_lens", (1,))
    require_contiguous(seq_lens, "seq_lens")
    batch = seq_lens.shape[0] if is_ragged else query.shape[0]
    require_shape(seq_lens, "seq_lens", ((batch,),), "batch of query")
    tables = require_tensor(inputs.block_tables, "block_tables")
    require_index(tables, "block_tables", query.device)
    require_dims(tables, "block_tables", (2,))
    require_dense_last_dim(tables, "block_tables")
    require(tables.shape[0] == batch, "block_tables.shape[0]", f"{batch} (batch)", tables.shape[0])
    _check_whole_number(inputs.max_seq_len, "max_seq_len", least=0)

    q_len, query_stride = _check_query_tokens(inputs, batch)
    tokens = query.shape[0] if is_ragged else batch * q_len
    require(
        tokens <= batch * q_len,
        "query.shape[0]",
        f"{batch * q_len} or less (batch * max_q_len)",
        tokens,
    )
    workspace = require_tensor(inputs.workspace_buffer, "workspace_buffer")
    require_device(workspace, "workspace_buffer", query.device)
    require_contiguous(workspace, "workspace_buffer")
    require_scale(inputs.bmm1_scale, "bmm1_scale", query.device)
    require_scale(inputs.bmm2_scale, "bmm2_scale", query.device)
    _check_sinks(inputs, heads)
    out_shape = _check_out(inputs)
    lse_shape = _check_lse(inputs, tokens)
    check_pointers(inputs)
    dtype = DTYPES[query.dtype]
    require_supported(
        dtype, dtype, inputs.kv_lora_rank, inputs.qk_rope_head_dim, page_size=cache.shape[1]
    )
    return MlaRequest(
        device=query.device,
        dtype=query.dtype,
        batch=batch,
        q_len=q_len,
        tokens=tokens,
        heads=heads,
        kv_lora_rank=inputs.kv_lora_rank,
        qk_rope_head_dim=inputs.qk_rope_head_dim,
        page_size=cache.shape[1],
        num_pages=cache.shape[0],
        max_pages=tables.shape[1],
        query_stride=query_stride,
        query_head_stride=query.stride(-2),
        page_stride=cache.stride(0),
        token_stride=cache.stride(1),
        block_tables_stride=tables.stride(0),
        out_shape=out_shape,
        lse_shape=lse_shape,
    )


def paged_cache(inputs: MlaInputs) -> torch.Tensor:
    """Return the cache as ``[pages, page_size, head_dim_qk]``, without copying.

    Raises
    ------
    ArgumentError
        If it has another form.
    """
    cache = require_tensor(inputs.kv_cache, "kv_cache")
    require_device(cache, "kv_cache", inputs.query.device)
    require_dims(cache, "kv_cache", (3, 4))
    if cache.dim() == 4:
        if 1 not in cache.shape[1:3]:
            rule = "[pages, 1, page_size, head_dim] or [pages, page_size, 1, head_dim]"
            refuse("kv_cache.shape", rule, list(cache.shape))
        cache = cache.squeeze(1 if cache.shape[1] == 1 else 2)
    _check_head_dim(cache, "kv_cache", inputs)
    require_dense_last_dim(cache, "kv_cache")
    require_aligned(cache, "kv_cache")
    return cache


def check_pointers(inputs: MlaInputs) -> None:
    """Refuse tensors that do not begin at whole 16-byte addresses.

    Raises
    ------
    ArgumentError
        If there is one; the message names it.
    """
    for name in ("query", "kv_cache", "workspace_buffer", "out"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            require_aligned_pointer(tensor, name)


def longest_query(inputs: MlaInputs) -> int:
    """Return the longest of the ragged queries; waits for the device.

    Raises
    ------
    ArgumentError
        If ``cum_seq_lens_q`` does not split the query's tokens among the requests.
    """
    cumulative = require_tensor(inputs.cum_seq_lens_q, "cum_seq_lens_q")
    if cumulative.is_cuda and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            "max_q_len: expected an int while a CUDA graph is captured, got None; without it the "
            "call would wait for the device"
        )
    tokens = inputs.query.shape[0]
    ends: list[int] = cumulative.tolist()
    require(ends[0] == 0, "cum_seq_lens_q[0]", 0, ends[0])
    require(ends[-1] == tokens, "cum_seq_lens_q[-1]", f"{tokens} (tokens of query)", ends[-1])
    lengths = [end - start for start, end in pairwise(ends)]
    require(min(lengths, default=0) >= 0, "cum_seq_lens_q", "values that do not decrease", ends)
    return max(lengths, default=0)


def _check_dtype(tensor: torch.Tensor, argument: str) -> None:
    if tensor.dtype is torch.float8_e4m3fn:  # a sound request elsewhere
        expected = " or ".join(map(str, DTYPES))
        raise UnsupportedError(
            f"{argument}.dtype: not implemented, expected {expected}, got {tensor.dtype}"
        )
    require_dtype(tensor, argument, tuple(DTYPES))


def _check_head_dim(tensor: torch.Tensor, argument: str, inputs: MlaInputs) -> None:
    for name in ("kv_lora_rank", "qk_rope_head_dim"):
        _check_whole_number(getattr(inputs, name), name, least=0)
    expected = inputs.kv_lora_rank + inputs.qk_rope_head_dim
    require(
        tensor.shape[-1] == expected,
        f"{argument}.shape[-1]",
        f"{expected} (kv_lora_rank + qk_rope_head_dim)",
        tensor.shape[-1],
    )


def _check_whole_number(value: object, argument: str, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        refuse(argument, f"an int, {least} or more", repr(value))


def _check_query_tokens(inputs: MlaInputs, batch: int) -> tuple[int, int]:
    """Return the longest query and the stride from one query token to the next."""
    query, cumulative = inputs.query, inputs.cum_seq_lens_q
    if cumulative is not None:
        require_tensor(cumulative, "cum_seq_lens_q")
        require_index(cumulative, "cum_seq_lens_q", query.device)
        require_shape(cumulative, "cum_seq_lens_q", ((batch + 1,),), "batch + 1")
        require_contiguous(cumulative, "cum_seq_lens_q")
        _check_whole_number(inputs.max_q_len, "max_q_len", least=0)
        assert inputs.max_q_len is not None
        return inputs.max_q_len, query.stride(0)
    require(inputs.max_q_len is None, "max_q_len", "None without cum_seq_lens_q", inputs.max_q_len)
    q_len = query.shape[1]
    require(q_len >= 1, "query.shape[1]", "1 or more", q_len)
    if q_len == 1:
        return q_len, query.stride(0)
    if batch > 1:
        expected = q_len * query.stride(1)
        require(
            query.stride(0) == expected,
            "query.stride(0)",
            f"{expected} (q_len * stride of a query token)",
            query.stride(0),
        )
    return q_len, query.stride(1)


def _check_sinks(inputs: MlaInputs, heads: int) -> None:
    if inputs.sinks is None:
        return
    sinks = require_tensor(inputs.sinks, "sinks")
    require_device(sinks, "sinks", inputs.query.device)
    require_dtype(sinks, "sinks", (torch.float32,))
    require_shape(sinks, "sinks", ((heads,),), "heads of query")
    require_contiguous(sinks, "sinks")


def _check_out(inputs: MlaInputs) -> tuple[int, ...]:
    query = inputs.query
    shape = (*query.shape[:-1], inputs.kv_lora_rank)
    if inputs.out is None:
        return shape
    out = require_tensor(inputs.out, "out")
    require_device(out, "out", query.device)
    require_dtype(out, "out", (query.dtype,), "dtype of query")
    without_q_len = (shape[0], *shape[2:])
    is_single = query.dim() == 4 and query.shape[1] == 1
    require_shape(out, "out", (shape, without_q_len) if is_single else (shape,))
    require_contiguous(out, "out")
    return tuple(out.shape)


def _check_lse(inputs: MlaInputs, tokens: int) -> tuple[int, ...]:
    if inputs.return_lse_base not in LSE_BASES:
        refuse("return_lse_base", " or ".join(map(repr, LSE_BASES)), repr(inputs.return_lse_base))
    query = inputs.query
    flat = (tokens, query.shape[-2])
    if inputs.lse is None or not inputs.return_lse:
        return flat
    lse = require_tensor(inputs.lse, "lse")
    require_device(lse, "lse", query.device)
    require_dtype(lse, "lse", (torch.float32,))
    require_shape(lse, "lse", (flat, tuple(query.shape[:-1])))
    require_contiguous(lse, "lse")
    return tuple(lse.shape)
