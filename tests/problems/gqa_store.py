"""KV caches of every dtype: stored elements, poison in unused memory, and float64 content."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from tests.problems.problem import E4M3

if TYPE_CHECKING:
    from tests.problems.gqa import GqaCase

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_VALUES = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float64)
_BLOCK = 16  # elements per scale
_NAN_BYTE = 0x7F  # in e4m3

# Standard deviation of the elements of each kind.
DEVIATION = {"16-bit": 1.0, "e4m3": 1.0, "int8": 73.0, "nvfp4": 2.9}


class Content(NamedTuple):
    """Keys and values of one sequence in float64, ``[seq_len, kv_heads, head_dim]``."""

    keys: torch.Tensor
    values: torch.Tensor


def _bits(cache: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers, since no 8-bit float can be indexed."""
    return cache.view(torch.int16 if cache.element_size() == 2 else torch.uint8)


@dataclass(frozen=True)
class Store:
    """Pages ``[pages, page_size, kv_heads, ...]`` of keys and values, and of their scales."""

    case: GqaCase
    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    def fill(self, ids: torch.Tensor, length: int, generator: torch.Generator) -> Content:
        """Store ``length`` tokens in the pages ``ids`` and return their float64 content."""
        keys = self._fill(self.key, self.key_scale, ids, length, generator)
        if self.case.cache_layout == "shared":
            return Content(keys, keys)
        return Content(keys, self._fill(self.value, self.value_scale, ids, length, generator))

    def _fill(
        self,
        cache: torch.Tensor,
        scale: torch.Tensor | None,
        ids: torch.Tensor,
        length: int,
        generator: torch.Generator,
    ) -> torch.Tensor:
        case = self.case
        shape = (length, case.kv_heads, case.head_dim)
        position = torch.arange(length)
        at = (ids[position // case.page_size], position % case.page_size)
        if scale is None:
            if case.kv == "int8":
                stored = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
            else:
                stored = torch.randn(shape, generator=generator).to(cache.dtype)
            _bits(cache)[at] = _bits(stored)
            return stored.double()
        nibbles = torch.randint(0, 16, shape, generator=generator)
        blocks = (*shape[:2], shape[2] // _BLOCK)
        factors = (torch.rand(blocks, generator=generator) * 2).to(E4M3)
        cache[at] = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).to(torch.uint8)
        scale[at] = factors.view(torch.uint8)
        return _E2M1_VALUES[nibbles] * factors.double().repeat_interleave(_BLOCK, dim=-1)

    def poison(self, slot: tuple[int, int]) -> None:
        """Make key and value of one token NaN."""
        if self.key_scale is not None and self.value_scale is not None:
            self.key_scale[slot] = self.value_scale[slot] = _NAN_BYTE
        elif self.case.kv == "e4m3":
            _bits(self.key)[slot] = _bits(self.value)[slot] = _NAN_BYTE
        else:
            self.key[slot] = self.value[slot] = math.nan

    def to(self, device: str) -> Store:
        """Return the store on ``device``."""
        moved = replace(self, key=self.key.to(device), value=self.value.to(device))
        if self.key_scale is None or self.value_scale is None:
            return moved
        scales = (self.key_scale.to(device), self.value_scale.to(device))
        return replace(moved, key_scale=scales[0], value_scale=scales[1])

    def caches(self, cache_layout: str, layout: str) -> object:
        """Return keys and values in a cache layout of the entry points."""
        return _in_layout(self.key, self.value, cache_layout, layout)

    def scales(self, cache_layout: str, layout: str) -> object:
        """Return the scales in the layout of the caches; None without scales."""
        if self.key_scale is None or self.value_scale is None:
            return None
        scales = _in_layout(self.key_scale, self.value_scale, cache_layout, layout)
        if isinstance(scales, torch.Tensor):  # the two accepted byte dtypes
            return scales.view(E4M3)
        return scales


def _in_layout(key: torch.Tensor, value: torch.Tensor, cache_layout: str, layout: str) -> object:
    if layout == "HND":
        key, value = (part.transpose(1, 2).contiguous() for part in (key, value))
    if cache_layout == "stacked":
        return torch.stack([key, value], dim=1)
    if cache_layout == "shared":
        return key[:, None]
    if cache_layout == "strided":
        return [_padded(key, 1), _padded(value, 2)]
    return [key, value] if cache_layout == "list" else (key, value)


def _padded(cache: torch.Tensor, extra: int) -> torch.Tensor:
    """Return a view in a cache with more elements, heads, tokens and pages, all of it poison."""
    pages, first, second, width = cache.shape
    shape = (pages + extra, first + extra, second + extra, width + 32 * extra)
    wide = torch.empty(shape, dtype=cache.dtype, device=cache.device)
    wide.view(torch.uint8).fill_(_NAN_BYTE)
    if cache.dtype in (torch.bfloat16, torch.float16):
        wide.fill_(math.nan)
    wide[:pages, :first, :second, :width] = cache
    return wide[:pages, :first, :second, :width]


def _halves(case: GqaCase, pages: int) -> Store:
    shape = (pages, case.page_size, case.kv_heads, case.head_dim)
    return Store(case, *(torch.full(shape, math.nan, dtype=case.dtype) for _ in range(2)))


def _bytes(case: GqaCase, pages: int, width: int) -> torch.Tensor:
    shape = (pages, case.page_size, case.kv_heads, width)
    return torch.full(shape, _NAN_BYTE, dtype=torch.uint8)


def _of(dtype: torch.dtype) -> Callable[[GqaCase, int], Store]:
    return lambda case, pages: Store(
        case, *(_bytes(case, pages, case.head_dim).view(dtype) for _ in range(2))
    )


def _nvfp4(case: GqaCase, pages: int) -> Store:
    widths = (case.head_dim // 2,) * 2 + (case.head_dim // _BLOCK,) * 2
    return Store(case, *(_bytes(case, pages, width) for width in widths))


# An int8 cache has no NaN: unused memory holds large numbers.
STORES: dict[str, Callable[[GqaCase, int], Store]] = {
    "16-bit": _halves,
    "e4m3": _of(E4M3),
    "int8": _of(torch.int8),
    "nvfp4": _nvfp4,
}
