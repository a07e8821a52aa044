"""Bytes of DeepSeek-V4's and V4.1's pools, and their float64 numbers, by the formats' definition.

Addresses are computed here, from the formats' definition, and nowhere else in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.problems.problem import E4M3, POISON

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
NAN_CODE = 0x7F  # of e4m3


@dataclass(frozen=True, kw_only=True)
class Row:
    """A data row of ``codes`` codes and ``rope`` bf16 elements, and a scale row."""

    codes: int
    bits: int = 8
    group: int
    scale: str = "ue8m0"
    pad: int = 0  # bytes behind the scales
    rope: int = 0

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes."""
        return self.codes * self.bits // 8

    @property
    def data(self) -> int:
        """Bytes of a data row."""
        return self.code_bytes + 2 * self.rope

    @property
    def scales(self) -> int:
        """Bytes of a scale row, pad included."""
        return self.codes // self.group + self.pad

    @property
    def width(self) -> int:
        """Bytes of a token."""
        return self.data + self.scales


V4 = Row(codes=448, group=64, pad=1, rope=64)  # 576 + 8
V41 = Row(codes=512, group=32)  # 512 + 16
V41_FP4 = Row(codes=512, bits=4, group=16, scale="e4m3")  # 256 + 32
NVFP4 = Row(codes=448, bits=4, group=16, scale="e4m3", pad=4, rope=64)  # 352 + 32

# Of both pools, by the name of the pair.
FORMATS = {
    "fp8": (V4, V4),
    "fp8_dsv41": (V41, V41),
    "fp8_dsv41_fp4_ca": (V41, V41_FP4),
    "fp8_dsv41_inline": (V41, V41),
    "fp8_dsv41_inline_fp4_ca": (V41, V41_FP4),
}


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Pages of a pool: how many, and where their bytes are."""

    page_size: int = 64
    count: int = 5
    page_bytes: int = 0  # between pages; 0: to the next multiple of 576, or inline of a token
    padding: int = 576
    pitch: int = 0  # bytes between inline tokens; 0: the row's
    spare_rows: int = 0  # inline: tokens that the padding of a page has room for
    is_cut: bool = False  # whether nothing is behind the last token


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """The memory of a pool, poison where no token was stored."""

    memory: torch.Tensor
    row: Row
    pages: Pages
    is_inline: bool
    stride: int  # bytes between pages
    pitch: int  # bytes between data rows

    @property
    def rows_per_page(self) -> int:
        """Rows that entries count of a page."""
        return self.stride // self.pitch if self.is_inline else self.pages.page_size

    def entry(self, page: int, slot: int) -> int:
        """Return the entry of a list that names a token."""
        return page * self.rows_per_page + slot

    def invalid_entries(self) -> list[int]:
        """Return entries that name no token."""
        past = [self.pages.count * self.rows_per_page, 2**31 - 1, -(2**31), -1]
        if self.rows_per_page > self.pages.page_size:
            past.append(self.pages.page_size)  # a row of the padding
        return past

    def starts(self, entry: int) -> tuple[int, int]:
        """Return the first bytes of the data and of the scales of a token."""
        page, slot = divmod(entry, self.rows_per_page)
        start = page * self.stride
        if self.is_inline:
            return start + slot * self.pitch, start + slot * self.pitch + self.row.data
        behind = start + self.pages.page_size * self.row.data
        return start + slot * self.row.data, behind + slot * self.row.scales

    def store(self, entry: int, data: torch.Tensor, scales: torch.Tensor) -> None:
        """Write a token; the pad behind its scales stays poison."""
        at, at_scales = self.starts(entry)
        self.memory[at : at + self.row.data] = data
        self.memory[at_scales : at_scales + len(scales)] = scales

    def view(self, device: str, layout: str) -> torch.Tensor:
        """Return the pool as a caller has it."""
        size, width = self.pages.page_size, self.row.width
        shape = (self.pages.count, size, width)
        slot = self.pitch if self.is_inline else width
        pool = self.memory.to(device).as_strided(shape, (self.stride, slot, 1))
        return {"3-D": pool, "HND": pool.unsqueeze(1), "NHD": pool.unsqueeze(2)}[layout]


def empty_pool(row: Row, pages: Pages, *, is_inline: bool) -> Bytes:
    """Return a pool of poison."""
    pitch = (pages.pitch or row.width) if is_inline else row.data
    used = pages.page_size * (pitch if is_inline else row.width)
    unit = pitch if is_inline else pages.padding
    stride = pages.page_bytes or -(-used // unit) * unit + pages.spare_rows * pitch
    last = used if not is_inline else used - pitch + row.width
    size = (pages.count - 1) * stride + last if pages.is_cut else pages.count * stride
    memory = torch.full((size,), POISON, dtype=torch.uint8)
    return Bytes(
        memory=memory, row=row, pages=pages, is_inline=is_inline, stride=stride, pitch=pitch
    )


def decoded(row: Row, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers ``[n, 512]`` of data and scale bytes, exactly."""
    codes, rope = data[:, : row.code_bytes], data[:, row.code_bytes :]
    if row.bits == 8:
        numbers = codes.contiguous().view(E4M3).double()
    else:
        numbers = _E2M1[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(1)
    if row.scale == "ue8m0":
        factors = torch.exp2(scales.double() - 127)
        factors[scales == 0xFF] = torch.nan
    else:
        factors = scales.contiguous().view(E4M3).double()
    parts = [numbers * factors.repeat_interleave(row.group, dim=1)]
    return torch.cat([*parts, rope.contiguous().view(torch.bfloat16).double()], dim=1)


def random_rows(
    row: Row, count: int, sizes: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of random tokens; ``sizes`` says how large their numbers are.

    ``alike``; ``groups far apart`` (neighbors differ by 2^40, or as much as e4m3 scales do);
    ``tokens far apart``; ``ends`` (of the exponents, with a token of the largest and others of the
    smallest); ``large rope``, or ``large rope of a few``.
    """

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    groups = row.codes // row.group
    codes = ints(0, 256, count, row.code_bytes)
    if row.bits == 8:
        codes[codes & 0x7F == NAN_CODE] = 0
    exponents = ints(118, 122, count, groups)
    if sizes == "groups far apart":
        exponents = torch.where(torch.arange(groups) % 2 == 0, 97, 137).expand(count, groups)
    elif sizes == "tokens far apart":
        exponents = ints(97, 122, count, 1).expand(count, groups)
    elif sizes == "ends":
        is_first = torch.arange(count)[:, None] == 0
        exponents = torch.where(is_first, 254, 1).expand(count, groups)
        # Sums of unnormalized weights times the largest numbers, up to 2^119, fit in fp32.
        small, large = ints(1, 3, count, row.codes), ints(0x38, 0x7F, count, row.codes)
        codes = torch.where(is_first, small, large) | ints(0, 2, count, row.codes) << 7
    scales = exponents
    if row.scale == "e4m3":
        scales = ints(0x20, 0x39, count, groups)
        if sizes != "alike":
            scales = torch.tensor([0, 1, 0x7E])[ints(0, 3, count, groups)]
    rope = torch.randn(count, row.rope, generator=generator) * (100 if "rope" in sizes else 1)
    if sizes == "large rope of a few":
        rope *= torch.where(ints(0, 48, count, 1) == 0, 1, 0.01)
    if sizes == "ends":
        rope *= 0
    rope_bytes = rope.to(torch.bfloat16).view(torch.uint8).view(count, 2 * row.rope)
    return torch.cat([codes.to(torch.uint8), rope_bytes], dim=1), scales.to(torch.uint8)
