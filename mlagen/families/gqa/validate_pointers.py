"""Alignment rules for the rows of a grouped-query decode call."""

from __future__ import annotations

import torch

from mlagen.families.common.arguments import ALIGNMENT_BYTES, reject
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.validate_kv import cache_names, paged_caches

# cp.async copies NVFP4 rows that are no multiple of 16 bytes 8 bytes at a time.
NVFP4_ALIGNMENT_BYTES = 8
MASK_ALIGNMENT_BYTES = 4


def alignment_of(tensor: torch.Tensor) -> int:
    """Return the required alignment of every row of a cache, in bytes."""
    if tensor.dtype is torch.uint8 and tensor.shape[-1] % ALIGNMENT_BYTES:
        return NVFP4_ALIGNMENT_BYTES
    return ALIGNMENT_BYTES


def require_aligned_strides(tensor: torch.Tensor, argument: str) -> None:
    """Reject a tensor with a stride that breaks the alignment of its rows."""
    elements = alignment_of(tensor) // tensor.element_size()
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if dim != tensor.dim() - 1 and size > 1 and stride % elements:
            reject(f"{argument}.stride({dim})", f"a multiple of {elements}", stride)


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
    _check(args.query, names.query, ALIGNMENT_BYTES)
    _check(key, key_name, alignment_of(key))
    _check(value, value_name, alignment_of(key))
    _check(args.workspace_buffer, names.workspace_buffer, ALIGNMENT_BYTES)
    if args.out is not None:
        _check(args.out, names.out, ALIGNMENT_BYTES)
    if args.mask is not None and args.q_len > 1:
        _check(args.mask, names.mask, MASK_ALIGNMENT_BYTES)


def _check(tensor: torch.Tensor, argument: str, alignment: int) -> None:
    excess = tensor.data_ptr() % alignment
    if excess:
        reject(f"{argument}.data_ptr()", f"a multiple of {alignment}", f"{excess} more than one")
