"""Rows of a format from elements, and their places in the pages of a pool, in torch ops.

No op waits for the device or has a shape that depends on contents, so a CUDA graph can capture a
write. Everything else follows the description of the row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from mlagen.families.common.arguments import ALIGNMENT_BYTES
from mlagen.families.mla.pools import Pool, check_pool
from mlagen.families.mla.prologue import Prologue
from mlagen.spec.rows import RowFormat

_E4M3 = torch.float8_e4m3fn
_E4M3_NAN, _UE8M0_NAN = 0x7F, 0xFF


class Elements(NamedTuple):
    """Elements of tokens, as a row has them."""

    scaled: torch.Tensor  # [n, scaled_elements]
    rest: torch.Tensor  # [n, bf16 elements]

    @property
    def width(self) -> int:
        """Elements of a token."""
        return self.scaled.shape[-1] + self.rest.shape[-1]


def split_elements(tokens: torch.Tensor, row: RowFormat) -> Elements:
    """Return tokens ``[n, d]`` as a row has their elements."""
    return Elements(tokens[:, : row.scaled_elements], tokens[:, row.scaled_elements :])


def pack_pages(tokens: torch.Tensor, row: RowFormat) -> torch.Tensor:
    """Return pages of the rows of ``tokens[pages, page_size, elements]``, without a kernel."""
    cache = new_pages(tokens, row)
    if tokens.numel():
        pool = check_pool(cache, "cache", row, tokens.shape[-1], tokens.device)
        write_in_torch(split_elements(tokens.flatten(0, 1), row), None, pool, row)
    return cache


def new_pages(tokens: torch.Tensor, row: RowFormat, page_stride: int = 0) -> torch.Tensor:
    """Return a cache for ``tokens[pages, page_size, elements]``; a compiler traces it.

    Without a stride, pages of rows that are no whole 16 bytes are padded to whole data rows, as
    FlashMLA, vLLM and SGLang do.
    """
    num_pages, page_size, elements = tokens.shape
    size, data_bytes = row.row_bytes(elements), row.data_bytes(elements)
    stride = page_stride or page_size * size
    if not page_stride and size % ALIGNMENT_BYTES:
        stride = -(-stride // data_bytes) * data_bytes
    memory = torch.empty(num_pages * stride, dtype=torch.uint8, device=tokens.device)
    return memory.as_strided((num_pages, page_size, size), (stride, size, 1))


def write_in_torch(
    elements: Elements,
    slot_mapping: torch.Tensor | None,
    pool: Pool,
    row: RowFormat,
    scales: torch.Tensor | None = None,
    prologue: Prologue | None = None,
) -> None:
    """Write rows as :func:`mlagen.families.mla.write.write` does."""
    places = places_of(pool, row, elements.width, scales)
    if slot_mapping is None:
        for part, place in zip(parts_of(elements, row), places, strict=True):
            place.copy_(part.view(place.shape))
        return
    elements = Elements(*(part[: len(slot_mapping)] for part in elements))
    if prologue is not None:
        elements = split_elements(prologue.of(torch.cat(elements, dim=1), row.value_elements), row)
    writes = plan_writes(slots_of(slot_mapping, pool), pool.cache[..., 0].numel())
    for part, place in zip(parts_of(elements, row), places, strict=True):
        writes.put(part, place)


class PagedPlaces(NamedTuple):
    """Places of tokens in a paged cache: positions of requests with flat page ids, all int32."""

    batch_indices: torch.Tensor  # [n]
    positions: torch.Tensor  # [n]
    kv_indices: torch.Tensor
    kv_indptr: torch.Tensor  # [batch + 1]


def write_plain_in_torch(
    elements: Elements,
    caches: tuple[torch.Tensor, torch.Tensor],
    places: PagedPlaces,
    prologue: Prologue | None = None,
) -> None:
    """Write tokens as :func:`mlagen.families.mla.write.write_plain` does."""
    num_pages, page_size = caches[0].shape[:2]
    if prologue is not None:
        latent_dim = elements.scaled.shape[1]
        tokens = prologue.of(torch.cat(elements, dim=1), latent_dim)
        elements = Elements(tokens[:, :latent_dim], tokens[:, latent_dim:])
    slots = paged_slots(places, num_pages, page_size)
    writes = plan_writes(slots, num_pages * page_size)
    for part, cache in zip(elements, caches, strict=True):
        # Not every version of torch can index e4m3.
        integer = torch.uint8 if cache.element_size() == 1 else torch.int16
        writes.put(part.view(integer), cache.view(integer))


class Writes(NamedTuple):
    """Which rows are written where.

    A row without a slot and a later row of a slot repeat another row's write. If no row has a slot,
    slot 0 keeps its content.
    """

    rows: torch.Tensor  # int64[n]
    slots: torch.Tensor  # int64[n], page * page_size + slot
    has_slots: torch.Tensor  # bool[n], all equal

    def put(self, content: torch.Tensor, place: torch.Tensor) -> None:
        """Write ``content[n, size]`` into ``place[pages, page_size, size]``."""
        pages, slots = self.slots // place.shape[1], self.slots % place.shape[1]
        kept = place[pages[:1], slots[:1]]
        place[pages, slots] = torch.where(self.has_slots[:, None], content[self.rows], kept)


def plan_writes(slots: torch.Tensor, num_slots: int) -> Writes:
    """Return the writes of rows into ``slots[n]``: of equal ones the first row's, of others none.

    Slots outside of ``num_slots`` are skipped.
    """
    is_valid = (slots >= 0) & (slots < num_slots)
    slots, rows = torch.where(is_valid, slots, num_slots).sort(stable=True)
    is_first = torch.ones_like(slots, dtype=torch.bool)
    is_first[1:] = slots[1:] != slots[:-1]
    places = torch.arange(len(slots), dtype=torch.int64, device=slots.device)
    first = torch.where(is_first & (slots < num_slots), places, 0).cummax(dim=0).values
    slots = slots[first]
    has_slots = slots < num_slots
    return Writes(rows[first], torch.where(has_slots, slots, 0), has_slots)


def slots_of(entries: torch.Tensor, pool: Pool) -> torch.Tensor:
    """Return the slots of a pool at its entries; -1 for an invalid entry."""
    num_pages, page_size = pool.cache.shape[:2]
    entries = entries.long()
    pages = torch.div(entries, pool.rows_per_page, rounding_mode="floor")
    slots = entries - pages * pool.rows_per_page
    is_valid = (pages >= 0) & (pages < num_pages) & (slots < page_size)
    return torch.where(is_valid, pages * page_size + slots, -1)


def paged_slots(places: PagedPlaces, num_pages: int, page_size: int) -> torch.Tensor:
    """Return the slots at positions of requests; -1 where a request has no page for one."""
    kv_indices, kv_indptr = places.kv_indices, places.kv_indptr
    batch = len(kv_indptr) - 1
    requests, positions = places.batch_indices.long(), places.positions.long()
    is_valid = (requests >= 0) & (requests < batch) & (positions >= 0)
    requests = requests.clamp(0, batch - 1)
    columns = kv_indptr[requests].long() + positions // page_size
    is_valid &= (columns >= 0) & (columns < kv_indptr[requests + 1]) & (columns < len(kv_indices))
    pages = kv_indices[columns.clamp(0, len(kv_indices) - 1)].long()
    is_valid &= (pages >= 0) & (pages < num_pages)
    return torch.where(is_valid, pages * page_size + positions % page_size, -1)


def places_of(
    pool: Pool, row: RowFormat, elements: int, scales: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return the places ``[pages, page_size, size]`` of the parts of a row, as in its parts."""
    cache = pool.cache
    num_pages, page_size = cache.shape[:2]

    def bytes_at(offset: int, size: int, stride: int) -> torch.Tensor:
        shape, strides = (num_pages, page_size, size), (pool.page_stride, stride, 1)
        return cache.as_strided(shape, strides, cache.storage_offset() + offset)

    data_bytes = row.data_bytes(elements)
    places = [bytes_at(0, data_bytes, pool.token_stride)]
    if row.has_scale_rows:
        places.append(bytes_at(page_size * data_bytes, row.scale_bytes, row.scale_bytes))
    elif scales is not None:
        places.append(scales[..., None] if scales.dim() == 2 else scales)
    return places


def parts_of(elements: Elements, row: RowFormat) -> list[torch.Tensor]:
    """Return rows as parts: bytes of data rows, then of scale rows, or fp32 scales."""
    codes, scales, factors = quantized(elements.scaled, row)
    rest = elements.rest
    if row.scales_bf16:
        rest = rest.float() / factors
    data = [codes, _as_bf16(rest).contiguous().view(torch.uint8)]
    if row.scale_place == "tensor":
        return [torch.cat(data, dim=1), scales]
    scales = scales.view(torch.uint8)
    scales = torch.nn.functional.pad(scales, (0, row.scale_padding))
    if row.has_inline_scales:
        return [torch.cat([codes, scales, *data[1:]], dim=1)]
    return [torch.cat(data, dim=1), scales]


def quantized(
    elements: torch.Tensor, row: RowFormat
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the codes ``uint8[n, code_bytes]`` of elements, their scales, and these in fp32.

    A group that is not finite has a NaN scale. Its e4m3 codes are NaN if it has a NaN, else those
    of its infinities; e2m1 has no NaN.
    """
    groups = elements.float().reshape(len(elements), row.scales, row.group)
    largest = groups.abs().amax(dim=-1)
    is_finite = largest.isfinite()
    # In a tensor on the device, as torch multiplies CUDA tensors by the reciprocal of a number.
    code_max = torch.full((), row.code_max, dtype=torch.float32, device=elements.device)
    scales = torch.where(is_finite, largest / code_max, 1.0).clamp(min=row.min_scale)
    stored, factors = _stored_scales(scales, row.scale_code, ~is_finite)
    finite = groups / factors[..., None]
    if row.code == "e2m1":
        codes = _e2m1_codes(finite.masked_fill(~is_finite[..., None], 0.0))
    else:
        is_nan = largest.isnan()[..., None] | groups.isinf()
        rest = torch.where(is_nan, math.nan, torch.copysign(torch.zeros_like(groups), groups))
        codes = _e4m3_codes(torch.where(is_finite[..., None], finite, rest))
    return codes.reshape(len(codes), row.code_bytes), stored, factors


def _stored_scales(
    scales: torch.Tensor, code: str, is_nan: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positive fp32 scales as they are stored, and their values."""
    if code == "ue8m0":
        bits = scales.view(torch.int32)
        exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0)  # rounded up to a power of two
        stored = exponents.to(torch.uint8).masked_fill(is_nan, _UE8M0_NAN)
        return stored, (exponents << 23).view(torch.float32)
    if code == "e4m3":
        stored = _e4m3_codes(scales)
        return stored.masked_fill(is_nan, _E4M3_NAN), stored.view(_E4M3).float()
    scales = scales.masked_fill(is_nan, math.nan)
    return scales, scales


def _e4m3_codes(numbers: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(_E4M3).max  # not every torch saturates
    return numbers.clamp(-largest, largest).to(_E4M3).view(torch.uint8)


def _e2m1_codes(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers as bytes of two codes, each rounded to the nearest, ties to even."""
    size = numbers.abs().clamp(max=6.0)  # steps of 1/2 below 2, of 1 below 4, of 2 above
    above = torch.where(size < 4.0, size.round() + 2.0, (size / 2.0).round() + 4.0)
    magnitudes = torch.where(size < 2.0, (size * 2.0).round(), above).to(torch.uint8)
    codes = magnitudes | (numbers.signbit().to(torch.uint8) << 3)
    low, high = codes.reshape(len(codes), -1, 2).unbind(dim=2)
    return low | (high << 4)


def _as_bf16(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers in bf16; of bf16 the same bits, of another dtype the same NaN everywhere."""
    if numbers.dtype is torch.bfloat16:
        return numbers
    return numbers.bfloat16().masked_fill(numbers.isnan(), math.nan)
