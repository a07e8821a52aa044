"""Writes of tokens into pages: by a kernel on a GPU, else in torch ops, to the same bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from mlagen.engine import kernel_for
from mlagen.families.common.arguments import ALIGNMENT_BYTES, DTYPES, INT32_MAX
from mlagen.families.mla.pools import Pool
from mlagen.families.mla.prologue import Prologue
from mlagen.families.mla.write_rows import Elements, write_in_torch
from mlagen.runtime.device import arch_of_device
from mlagen.runtime.launch import launch
from mlagen.runtime.packing import ParameterPacking
from mlagen.spec.rows import RowFormat
from mlagen.spec.write_rows import WriteRowsSpec, write_rows_spec


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
    device = _gpu_of(pool.cache)
    spec = None
    if device is not None and len(pool.cache) * pool.rows_per_page <= INT32_MAX:
        dtype = DTYPES[elements.scaled.dtype]
        spec = write_rows_spec(
            arch_of_device(device), dtype, row, elements.width, has_prologue=prologue is not None
        )
    if spec is None or device is None:
        write_in_torch(elements, slot_mapping, pool, row, scales, prologue)
    else:
        elements = Elements(*map(_aligned, elements))
        _launch(spec, device, elements, slot_mapping, pool, scales, prologue)


def _gpu_of(tensor: torch.Tensor) -> int | None:
    index: int = tensor.device.index
    return index if tensor.device.type == "cuda" else None


def _aligned(tokens: torch.Tensor) -> torch.Tensor:
    """Return tokens whose rows the kernel can load, copied if they are not."""
    is_dense = tokens.stride(1) == 1 or tokens.shape[1] <= 1
    bytes_of_row = tokens.stride(0) * tokens.element_size() if len(tokens) > 1 else 0
    is_aligned = not (bytes_of_row % ALIGNMENT_BYTES or tokens.data_ptr() % ALIGNMENT_BYTES)
    if not tokens.numel() or (is_dense and is_aligned):
        return tokens
    return tokens.clone(memory_format=torch.contiguous_format)


def _launch(
    spec: WriteRowsSpec,
    device: int,
    elements: Elements,
    slot_mapping: torch.Tensor | None,
    pool: Pool,
    scales: torch.Tensor | None,
    prologue: Prologue | None,
) -> None:
    scaled, rest = elements
    num_pages, page_size, _ = pool.cache.shape
    plan = _plan(
        spec,
        (len(scaled) if slot_mapping is None else len(slot_mapping), num_pages, page_size),
        (scaled.stride(0) * scaled.element_size(), rest.stride(0) * rest.element_size()),
        (pool.page_stride, pool.token_stride, pool.rows_per_page),
        (0, 0) if scales is None else (scales.stride(0), scales.stride(1)),
        _is_wide(slot_mapping),
        () if prologue is None else _numbers_of(prologue),
    )
    launch(
        kernel_for(spec, device),
        plan.num_ctas,
        True,
        (
            scaled.data_ptr(),
            rest.data_ptr(),
            _address(slot_mapping),
            *(() if prologue is None else map(_address, prologue[:3])),
            pool.cache.data_ptr(),
            _address(scales),
            plan.constants,
        ),
    )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _is_wide(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.dtype is torch.int64


def _numbers_of(prologue: Prologue) -> tuple[float, int, bool]:
    table = prologue.cos_sin_cache
    num_positions = 0 if table is None else len(table)
    return prologue.norm_eps, num_positions, _is_wide(prologue.positions)


class _Plan(NamedTuple):
    """The grid of a launch, and the parameters that follow from shapes and strides."""

    num_ctas: int
    constants: bytes


@lru_cache(maxsize=4096)
def _plan(
    spec: WriteRowsSpec,
    shape: tuple[int, int, int],
    token_strides: tuple[int, int],
    pool_strides: tuple[int, int, int],
    scale_strides: tuple[int, int],
    has_wide_slots: bool,
    prologue: tuple[float, int, bool] | tuple[()],
) -> _Plan:
    (num_tokens, num_pages, page_size), row = shape, spec.row
    page_stride, token_stride, rows_per_page = pool_strides
    norm_eps, num_positions, has_wide_positions = prologue or (0.0, 0, False)
    values = {
        "scaled_stride": token_strides[0],
        "rest_stride": token_strides[1],
        "page_stride": page_stride,
        "token_stride": token_stride,
        "scale_rows_offset": page_size * row.data_bytes(spec.head_dim_qk),
        "scale_page_stride": scale_strides[0],
        "scale_token_stride": scale_strides[1],
        "num_tokens": num_tokens,
        "num_entries": num_pages * rows_per_page,
        "rows_per_page": rows_per_page,
        "page_size": page_size,
        "has_wide_slots": int(has_wide_slots),
        "norm_eps": norm_eps,
        "num_positions": num_positions,
        "has_wide_positions": int(has_wide_positions),
    }
    num_ctas = -(-num_tokens * 32 // spec.threads)
    return _Plan(num_ctas, ParameterPacking(spec).pack_constants(values))
