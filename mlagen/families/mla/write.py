"""Writes of tokens into pages: by a kernel on a GPU, else in torch ops, to the same bytes."""

from __future__ import annotations

from functools import lru_cache

import torch

from mlagen.engine import kernel_for
from mlagen.families.common.arguments import ALIGNMENT_BYTES, DTYPES, INT32_MAX
from mlagen.families.mla.pools import Pool
from mlagen.families.mla.prologue import Prologue
from mlagen.families.mla.write_rows import (
    Elements,
    PagedPlaces,
    write_in_torch,
    write_plain_in_torch,
)
from mlagen.runtime.device import arch_of_device
from mlagen.runtime.launch import launch
from mlagen.runtime.packing import ParameterPacking
from mlagen.spec.rows import RowFormat
from mlagen.spec.write_rows import WriteRowsSpec, write_plain_spec, write_rows_spec


def write(
    elements: Elements,
    slot_mapping: torch.Tensor | None,
    pool: Pool,
    row: RowFormat,
    scales: torch.Tensor | None = None,
    prologue: Prologue | None = None,
) -> None:
    """Write rows into a pool, of one token or more, at its entries, or in order into whole pages.

    Of equal entries the first token's counts, and an invalid one skips its token. ``scales[pages,
    page_size]`` are those of a row without its own.
    """
    device, spec = _gpu_of(pool.cache), None
    num_entries = len(pool.cache) * pool.rows_per_page
    if device is not None and num_entries <= INT32_MAX:
        facts = arch_of_device(device), DTYPES[elements.scaled.dtype], row, elements.width
        spec = write_rows_spec(*facts, has_prologue=prologue is not None)
    if spec is None or device is None:
        write_in_torch(elements, slot_mapping, pool, row, scales, prologue)
        return
    page_size = pool.cache.shape[1]
    scale_strides = (0, 0) if scales is None else scales.stride()
    numbers: dict[str, float] = {
        "num_tokens": len(elements.scaled if slot_mapping is None else slot_mapping),
        "num_entries": num_entries,
        "page_stride": pool.page_stride,
        "token_stride": pool.token_stride,
        "rows_per_page": pool.rows_per_page,
        "page_size": page_size,
        "scale_rows_offset": page_size * row.data_bytes(elements.width),
        "scale_page_stride": scale_strides[0],
        "scale_token_stride": scale_strides[1],
        "has_wide_slots": slot_mapping is not None and slot_mapping.dtype is torch.int64,
    }
    tensors = {"slot_mapping": slot_mapping, "cache": pool.cache, "scales": scales}
    _launch(spec, device, elements, numbers, tensors, prologue)


def write_plain(
    elements: Elements,
    caches: tuple[torch.Tensor, torch.Tensor],
    places: PagedPlaces,
    prologue: Prologue | None = None,
) -> None:
    """Write tokens, one or more, that are not quantized: each part into its cache.

    Of equal places the first token's counts, and an invalid one skips its token.
    """
    device, spec = _gpu_of(caches[0]), None
    (num_pages, page_size), dtype = caches[0].shape[:2], elements.scaled.dtype
    if device is not None and dtype in DTYPES and all(map(_is_aligned, caches)):
        facts = arch_of_device(device), DTYPES[dtype], *(part.shape[1] for part in elements)
        spec = write_plain_spec(*facts, has_prologue=prologue is not None)
    if spec is None or device is None or num_pages * page_size > INT32_MAX:
        write_plain_in_torch(elements, caches, places, prologue)
        return
    strides = [stride * cache.element_size() for cache in caches for stride in cache.stride()[:2]]
    names = ("page_stride", "token_stride", "rest_page_stride", "rest_token_stride")
    numbers: dict[str, float] = {
        "num_tokens": len(elements.scaled),
        "num_entries": num_pages * page_size,
        **dict(zip(names, strides, strict=True)),
        "rows_per_page": page_size,
        "page_size": page_size,
        "num_seqs": len(places.kv_indptr) - 1,
        "num_indices": len(places.kv_indices),
    }
    tensors: dict[str, torch.Tensor | None] = {
        "cache": caches[0],
        "rest_cache": caches[1],
        **places._asdict(),
    }
    _launch(spec, device, elements, numbers, tensors, prologue)


def _gpu_of(tensor: torch.Tensor) -> int | None:
    index: int = tensor.device.index
    return index if tensor.device.type == "cuda" else None


def _is_aligned(rows: torch.Tensor) -> bool:
    """Whether the kernel can load or store rows, the last axis of a tensor."""
    *strides, last = rows.stride()
    offsets, size = rows.data_ptr(), rows.element_size()
    for stride in strides:
        offsets |= stride * size
    return (last == 1 and not offsets % ALIGNMENT_BYTES) or not rows.numel()


def _launch(
    spec: WriteRowsSpec,
    device: int,
    elements: Elements,
    numbers: dict[str, float],
    tensors: dict[str, torch.Tensor | None],
    prologue: Prologue | None,
) -> None:
    """Launch a kernel with parameters by name, and those of tokens and prologue."""
    scaled, rest = (
        part if _is_aligned(part) else part.clone(memory_format=torch.contiguous_format)
        for part in elements
    )
    numbers["scaled_stride"] = scaled.stride(0) * scaled.element_size()
    numbers["rest_stride"] = rest.stride(0) * rest.element_size()
    if prologue is not None:
        tensors = prologue.tensors | tensors
        numbers |= prologue.numbers
    values: dict[str, float | bytes] = {
        name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()
    }
    values |= {"scaled": scaled.data_ptr(), "rest": rest.data_ptr()}
    values[spec.symbol] = _constants(spec, *numbers.items())
    kernel, num_ctas = kernel_for(spec, device), -(-numbers["num_tokens"] * 32 // spec.threads)
    launch(kernel, int(num_ctas), True, kernel.packing.values_of(values))


@lru_cache(maxsize=4096)
def _constants(spec: WriteRowsSpec, *numbers: tuple[str, float]) -> bytes:
    return ParameterPacking(spec).pack_constants(dict(numbers))
