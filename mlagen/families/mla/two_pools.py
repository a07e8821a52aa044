"""Top-k indices into two pools of quantized rows: checks, and parameters of the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mlagen.families.common.arguments import (
    INT32_MAX,
    check_token_stride,
    reject,
    require,
    require_dense_last_dim,
    require_dims,
    require_index,
    require_ints,
    require_served,
    require_shape,
    require_tensor,
    token_stride,
)
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.pools import Pool, check_pool
from mlagen.families.mla.write_rows import slots_of
from mlagen.spec.dtype import EXTRA_ROW_FORMATS, ROW_FORMATS, DType
from mlagen.spec.rows import RowFormat

_SHIFT_BITS = 32

# FlashInfer's words; "fp8" has another meaning in its other entry points.
FORMATS: dict[str, DType] = {"fp8": DType.FP8_DSV4} | {
    dtype.value: dtype for dtype in EXTRA_ROW_FORMATS if dtype is not DType.FP8_DSV4
}
UNSERVED_FORMATS = {"nvfp4": 384}  # bytes of a row


def kv_format_of(kv_cache_format: object) -> DType:
    """Return the pair of row formats of ``kv_cache_format``.

    Raises ArgumentError if it is none of FlashInfer's; UnsupportedError if it is one that no kernel
    reads.
    """
    unserved = [word for word in UNSERVED_FORMATS if word not in FORMATS]
    return FORMATS[require_served(kv_cache_format, "kv_cache_format", FORMATS, unserved)]


class TopkList(NamedTuple):
    """A valid pool, and the top-k indices of query tokens into it."""

    name: str  # of the indices
    lens_name: str
    row: RowFormat
    pool: Pool
    indices: torch.Tensor  # int32 [tokens, top_k]
    indices_stride: int  # elements between query tokens
    lens: torch.Tensor  # int32 [tokens], as given: of any value

    @property
    def top_k(self) -> int:
        """Indices of a query token."""
        return self.indices.shape[1]


def check_lists(args: MlaArgs, tokens: int) -> list[TopkList]:
    """Return the pools of a call with their top-k indices, one or two."""
    dtype = DType(args.kv_cache_format)
    first = ("kv_cache", "block_tables", "top_k_lens")
    lists = [_checked_list(args, first, ROW_FORMATS[dtype], tokens)]
    if args.extra_indices is not None:
        second = ("extra_cache", "extra_indices", "extra_top_k_lens")
        lists.append(_checked_list(args, second, EXTRA_ROW_FORMATS[dtype], tokens))
    width = sum(each.top_k for each in lists)
    require(width <= INT32_MAX, f"{lists[-1].name}.shape", f"{INT32_MAX} indices or fewer", width)
    return lists


def strides_of(lists: list[TopkList]) -> dict[str, int]:
    """Return the strides of pools, and those of the indices into a second one."""
    first, extra = lists[0], lists[1] if len(lists) > 1 else None
    page, token = first.pool.page_stride, first.pool.token_stride
    return {
        "page_stride": page,
        "rope_page_stride": page,
        "token_stride": token,
        "rope_token_stride": token,
        "extra_page_stride": 0 if extra is None else extra.pool.page_stride,
        "extra_token_stride": 0 if extra is None else extra.pool.token_stride,
        "extra_indices_stride": 0 if extra is None else extra.indices_stride,
    }


def pool_parameters_of(lists: list[TopkList]) -> dict[str, int]:
    """Return the other kernel parameters of two pools; the second may be missing."""
    first, extra = lists[0], lists[1] if len(lists) > 1 else None
    return {
        "extra_topk": 0 if extra is None else extra.top_k,
        "extra_num_pages": 0 if extra is None else len(extra.pool.cache),
        **_page_parameters("", first),
        **_page_parameters("extra_", extra),
    }


def divider_of(divisor: int) -> tuple[int, int]:
    """Return ``(mul, shift)`` with ``g // divisor == (g * mul) >> (32 + shift)``.

    For ``0 <= g < 2^31`` and ``1 <= divisor < 2^31``: ``mul * divisor`` exceeds ``2^(32 + shift)``
    by less than ``divisor``, which is at most ``2^(shift + 1)``, so the quotient errs by less than
    ``1 / divisor``.
    """
    shift = (divisor - 1).bit_length() - 1
    return -(-(1 << (_SHIFT_BITS + shift)) // divisor), shift


def check_list_contents(lists: list[TopkList]) -> None:
    """Reject lengths out of range, and top-k indices that are neither -1 nor of a token."""
    for each in lists:
        indices, lens = each.indices.cpu(), each.lens.cpu()
        for token in ((lens < 0) | (lens > each.top_k)).nonzero().flatten()[:1].tolist():
            rule = f"0 to {each.top_k} (width of {each.name})"
            reject(f"{each.lens_name}[{token}]", rule, int(lens[token]))
        is_used = torch.arange(each.top_k, dtype=torch.int64, device="cpu") < lens[:, None]
        is_invalid = (slots_of(indices, each.pool) < 0) & (indices != -1)
        for token, column in (is_used & is_invalid).nonzero()[:1].tolist():
            pages, page_size, _ = each.pool.cache.shape
            rule = f"-1, or a token of {pages} pages of {page_size}"
            reject(f"{each.name}[{token}, {column}]", rule, int(indices[token, column]))


def _page_parameters(prefix: str, of: TopkList | None) -> dict[str, int]:
    rows = 1 if of is None else of.pool.rows_per_page
    mul, shift = divider_of(rows)
    return {
        f"{prefix}page_size": 0 if of is None else of.pool.cache.shape[1],
        f"{prefix}rows_per_page": rows,
        f"{prefix}rows_per_page_mul": mul,
        f"{prefix}rows_per_page_shift": shift,
    }


def _checked_list(
    args: MlaArgs, fields: tuple[str, str, str], row: RowFormat, tokens: int
) -> TopkList:
    """Return a pool and the indices into it, from three arguments."""
    cache, indices, lens = (getattr(args, field) for field in fields)
    cache_name, name, lens_name = (getattr(args.names, field) for field in fields)
    query, elements = args.query, args.kv_lora_rank + args.qk_rope_head_dim
    device, leading = query.device, tuple(query.shape[:2])
    pool = check_pool(
        cache, cache_name, row, elements, device, counts_padding=row.has_inline_scales
    )
    require_tensor(indices, name)
    require_index(indices, name, device)
    require_dims(indices, name, (2, 3))
    top_k = indices.shape[-1]
    require(top_k >= 1, f"{name}.shape[-1]", "1 or more", top_k)
    allowed = ((tokens, top_k), (*leading, top_k), (tokens, 1, top_k))
    require_shape(indices, name, allowed, "query tokens, top-k indices")
    require_dense_last_dim(indices, name)
    stride = indices.stride(0)
    if indices.dim() == 3:
        check_token_stride(indices, name)
        stride = token_stride(indices, indices.shape[1])
    if tokens > 1:
        rule = f"{top_k} or more (top-k indices)"
        require(stride >= top_k, f"stride of a query token of {name}", rule, stride)
    require_ints(lens, lens_name, device, ((tokens,), leading), "query tokens")
    flat = indices.reshape(tokens, top_k).view(torch.int32)
    return TopkList(
        name, lens_name, row, pool, flat, stride, lens.reshape(tokens).view(torch.int32)
    )
