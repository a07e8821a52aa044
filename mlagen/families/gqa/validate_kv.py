"""Layouts of a paged KV cache and its block scales, and the alignment of rows.

K and V pages are two tensors or one, with heads after the tokens of a page (NHD) or before (HND).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mlagen.families.common.arguments import (
    ALIGNMENT_BYTES,
    reject,
    require,
    require_aligned_pointer,
    require_dense_last_dim,
    require_device,
    require_dims,
    require_dtype,
    require_shape,
    require_tensor,
)
from mlagen.families.gqa.args import GqaArgs
from mlagen.spec.dtype import DType

# Cache dtypes besides the dtype of the query.
QUANTIZED = {
    torch.float8_e4m3fn: DType.E4M3,
    torch.int8: DType.INT8,
    torch.uint8: DType.NVFP4,
}
SCALE_DTYPES = (torch.uint8, torch.float8_e4m3fn)

# NVFP4 elements per e4m3 scale; a byte holds two elements.
NVFP4_BLOCK = 16

# cp.async copies NVFP4 rows that are no multiple of 16 bytes 8 bytes at a time.
NVFP4_ALIGNMENT_BYTES = 8
MASK_ALIGNMENT_BYTES = 4


class Pair(NamedTuple):
    """Keys and values, or their scales, as ``[pages, page_size, kv_heads, elements]``."""

    key: torch.Tensor
    value: torch.Tensor


def paged_caches(args: GqaArgs) -> Pair:
    """Return views of keys and values, without copying.

    Raises
    ------
    ArgumentError
        If they have no known layout, or differ in anything but their strides.
    """
    names = args.names
    key, value = _split(
        args.key_cache,
        args.value_cache,
        (names.kv_cache, names.key_cache, names.value_cache),
        args,
    )
    allowed = (args.query.dtype, *QUANTIZED)
    require_dtype(key, cache_names(args)[0], allowed, f"the first is that of {names.query}")
    if args.value_cache is not None:
        require_dtype(value, names.value_cache, (key.dtype,), f"dtype of {names.key_cache}")
        require_shape(value, names.value_cache, (tuple(key.shape),), f"shape of {names.key_cache}")
    return Pair(_swapped(key, args.kv_layout), _swapped(value, args.kv_layout))


def paged_scales(args: GqaArgs, caches: Pair) -> Pair | None:
    """Return views of the scales of keys and values; None where the cache has none.

    Raises
    ------
    ArgumentError
        If they are missing, unexpected, or do not match the cache.
    """
    names = args.names
    if caches.key.dtype is not torch.uint8:
        name = names.key_scales if args.value_scales is not None else names.kv_scales
        if args.key_scales is not None:
            reject(name, f"None for a cache of {caches.key.dtype}", "a tensor")
        if args.value_scales is not None:
            reject(names.value_scales, f"None for a cache of {caches.key.dtype}", "a tensor")
        return None
    key, value = _split(
        args.key_scales,
        args.value_scales,
        (names.kv_scales, names.key_scales, names.value_scales),
        args,
    )
    *leading, packed = _swapped(caches.key, args.kv_layout).shape
    shape = (*leading, packed * 2 // NVFP4_BLOCK)
    for scale, name in zip((key, value), scale_names(args), strict=True):
        require_dtype(scale, name, SCALE_DTYPES)
        require_shape(scale, name, (shape,), f"one for {NVFP4_BLOCK} elements of the cache")
        require_dense_last_dim(scale, name)
    return Pair(_swapped(key, args.kv_layout), _swapped(value, args.kv_layout))


def cache_names(args: GqaArgs) -> tuple[str, str]:
    """Return the parameter names of keys and values."""
    names = args.names
    if args.value_cache is None:
        return names.kv_cache, names.kv_cache
    return names.key_cache, names.value_cache


def scale_names(args: GqaArgs) -> tuple[str, str]:
    """Return the parameter names of the scales of keys and values."""
    names = args.names
    if args.value_scales is None:
        return names.kv_scales, names.kv_scales
    return names.key_scales, names.value_scales


def _split(
    first: object, second: object, names: tuple[str, str, str], args: GqaArgs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values in the caller's layout."""
    kv_name, key_name, value_name = names
    if second is None:
        kv = require_tensor(first, kv_name)
        require_device(kv, kv_name, args.query.device)
        require_dims(kv, kv_name, (5,))
        require(kv.shape[1] in {1, 2}, f"{kv_name}.shape[1]", "2, or 1 where K is V", kv.shape[1])
        return kv[:, 0], kv[:, -1]
    key, value = require_tensor(first, key_name), require_tensor(second, value_name)
    for tensor, name in ((key, key_name), (value, value_name)):
        require_device(tensor, name, args.query.device)
        require_dims(tensor, name, (4,))
    return key, value


def _swapped(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a view with heads and tokens swapped, if the layout is HND."""
    return tensor if layout == "NHD" else tensor.transpose(1, 2)


def alignment_of(tensor: torch.Tensor) -> int:
    """Return the required alignment of every row of a cache, in bytes."""
    if tensor.dtype is torch.uint8 and tensor.shape[-1] % ALIGNMENT_BYTES:
        return NVFP4_ALIGNMENT_BYTES
    return ALIGNMENT_BYTES


def check_pointers(args: GqaArgs) -> None:
    """Reject tensors with a misaligned base address.

    Raises
    ------
    ArgumentError
        If there is one; the message names it.
    """
    names = args.names
    key, value = paged_caches(args)
    key_name, value_name = cache_names(args)
    require_aligned_pointer(args.query, names.query)
    require_aligned_pointer(key, key_name, alignment_of(key))
    require_aligned_pointer(value, value_name, alignment_of(key))
    require_aligned_pointer(args.workspace_buffer, names.workspace_buffer)
    if args.out is not None:
        require_aligned_pointer(args.out, names.out)
    if args.mask is not None and args.q_len > 1:
        require_aligned_pointer(args.mask, names.mask, MASK_ALIGNMENT_BYTES)
