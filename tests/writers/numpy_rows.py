"""Packed rows in numpy, from their definitions: codes by search, bytes by address."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def _e4m3_numbers() -> list[float]:
    """Return the finite e4m3 numbers of codes 0 to 126."""
    numbers = [code / 8 * 2.0**-6 for code in range(8)]
    return numbers + [(1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(8, 127)]


E4M3 = np.array(_e4m3_numbers())
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class Row(NamedTuple):
    """A row as the formats' tables state it; a page has planes, or a row has all its parts."""

    codes: str
    group: int
    scale: str
    floor: float  # of a scale, as a number to round up
    scaled: int = 512
    rope: int = 0
    pad: int = 0
    place: str = "planes"  # "inline", "tensor"
    divides_rope: bool = False

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales and padding of a token in its page."""
        size = {"fp32": 4}.get(self.scale, 1)
        return 0 if self.place == "tensor" else self.scaled // self.group * size + self.pad

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a token."""
        return self.scaled if self.codes == "e4m3" else self.scaled // 2

    @property
    def data_bytes(self) -> int:
        """Bytes of codes and rope part of a token."""
        return self.code_bytes + 2 * self.rope

    @property
    def width(self) -> int:
        """Bytes of a token in its page."""
        return self.data_bytes + self.scale_bytes


V4_FLOOR = np.float32(1e-4) / np.float32(448)
ROWS = {
    "584": Row("e4m3", 64, "ue8m0", float(V4_FLOOR), scaled=448, rope=64, pad=1),
    "528": Row("e4m3", 32, "ue8m0", 1e-4),
    "528 inline": Row("e4m3", 32, "ue8m0", 1e-4, place="inline"),
    "288": Row("e2m1", 16, "e4m3", 2.0**-9),
    "288 inline": Row("e2m1", 16, "e4m3", 2.0**-9, place="inline"),
    "656": Row("e4m3", 128, "fp32", 2.0**-126, rope=64, place="inline"),
    "528 without rope": Row("e4m3", 128, "fp32", 2.0**-126, place="inline"),
    "640": Row("e4m3", 512, "fp32", 2.0**-64, rope=64, place="tensor", divides_rope=True),
    "384": Row("e2m1", 16, "e4m3", 2.0**-9, scaled=448, rope=64, pad=4),
}


def nearest(numbers: Floats, table: npt.NDArray[np.float64]) -> Bytes:
    """Return the index of the nearest number of a table for each magnitude, in a tie the even."""
    middles = (table[1:] + table[:-1]) / 2
    size = np.abs(numbers.astype(np.float64))
    below = np.searchsorted(middles, size, side="left")
    above = np.searchsorted(middles, size, side="right")
    return np.where(below % 2 == 0, below, above).astype(np.uint8)


def packed(tokens: torch.Tensor, row: Row) -> tuple[Bytes, Bytes, Floats]:
    """Return codes and rope parts, scales as bytes, and scales as numbers, of tokens ``[n, d]``."""
    count = len(tokens)
    numbers = tokens[:, : row.scaled].float().cpu().numpy().reshape(count, -1, row.group)
    largest = np.abs(numbers).max(axis=-1)
    bad = ~np.isfinite(largest)
    safe = np.where(bad, np.float32(1), largest)
    top = np.float32(448 if row.codes == "e4m3" else 6)
    raw = np.maximum(safe / top, np.float32(row.floor))
    if row.scale == "ue8m0":
        fraction, exponent = np.frexp(raw)  # raw = fraction * 2^exponent, fraction in [1/2, 1)
        exponent -= fraction == 0.5
        scales = np.ldexp(np.float32(1), exponent)
        scale_bytes = np.where(bad, 255, exponent + 127).astype(np.uint8)
    elif row.scale == "e4m3":
        codes = nearest(np.minimum(raw, np.float32(448)), E4M3)
        scales = E4M3[codes].astype(np.float32)
        scale_bytes = np.where(bad, 0x7F, codes).astype(np.uint8)
    else:
        scales = np.where(bad, np.float32(np.nan), raw).astype(np.float32)
        scale_bytes = scales.view(np.uint8).reshape(count, -1)
    with np.errstate(all="ignore"):
        quotients = (numbers / scales[..., None]).astype(np.float32)
    signs = np.signbit(numbers).astype(np.uint8)
    if row.codes == "e2m1":
        halves = np.where(bad[..., None], np.uint8(0), nearest(quotients, E2M1) | signs << 3)
        pairs = halves.reshape(count, -1, 2)
        data = pairs[..., 0] | pairs[..., 1] << 4
    else:
        codes = nearest(np.nan_to_num(quotients), E4M3) | signs << 7
        is_nan = np.isnan(largest)[..., None] | np.isinf(numbers)
        of_bad = np.where(is_nan, np.uint8(0x7F), signs << 7)
        data = np.where(bad[..., None], of_bad, codes).reshape(count, -1)
    if row.rope:
        rope = tokens[:, row.scaled :].cpu()
        if row.divides_rope:
            with np.errstate(all="ignore"):
                rope = torch.from_numpy(rope.float().numpy() / scales[:, :1])
        data = np.concatenate([data, bf16_bytes(rope)], axis=1)
    padding = np.zeros((count, row.pad), np.uint8)
    stored = np.concatenate([scale_bytes.reshape(count, -1), padding], axis=1)
    return data.astype(np.uint8), stored, np.asarray(scales, np.float32)


def bf16_bytes(numbers: torch.Tensor) -> Bytes:
    """Return bf16 numbers, or numbers rounded to it, as bytes; every NaN of another dtype alike."""
    if numbers.dtype is torch.bfloat16:
        return numbers.contiguous().view(torch.uint8).numpy()
    floats = numbers.float().contiguous().numpy()
    bits = floats.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    words = np.where(np.isnan(floats), 0x7FC0, rounded).astype(np.uint16)
    return words.view(np.uint8).reshape(len(floats), -1)


class Pages(NamedTuple):
    """Memory of a pool as bytes, its sizes, and the scales of its tokens if apart."""

    memory: Bytes
    pages: int
    page_size: int
    stride: int
    pitch: int
    scales: Floats


def write(pages: Pages, tokens: torch.Tensor, slots: list[int], row: Row, per_page: int) -> None:
    """Write tokens into slots of ``per_page`` for a page, the last first."""
    if not slots:
        return
    data, scales, numbers = packed(tokens, row)
    for i in reversed(range(len(slots))):
        page, slot = slots[i] // per_page, slots[i] % per_page
        if slots[i] < 0 or page >= pages.pages or slot >= pages.page_size:
            continue
        start = page * pages.stride
        if row.place == "planes":
            places = {start + slot * row.data_bytes: data[i]}
            places[start + pages.page_size * row.data_bytes + slot * row.scale_bytes] = scales[i]
        elif row.place == "inline":
            whole = np.insert(data[i], row.code_bytes, scales[i])
            places = {start + slot * pages.pitch: whole}
        else:
            places = {start + slot * pages.pitch: data[i]}
            pages.scales[page, slot] = numbers[i, 0]
        for at, content in places.items():
            pages.memory[at : at + len(content)] = content


def decoded(data: Bytes, scales: Bytes, numbers: Floats, row: Row) -> npt.NDArray[np.float64]:
    """Return the elements that bytes of :func:`packed` stand for."""
    count, codes = len(data), row.code_bytes
    if row.codes == "e2m1":
        halves = np.stack([data[:, :codes] & 15, data[:, :codes] >> 4], axis=-1).reshape(count, -1)
        values = E2M1[halves & 7] * np.where(halves & 8, -1, 1)
    else:
        values = np.append(E4M3, np.nan)[data[:, :codes] & 127]
        values = values * np.where(data[:, :codes] & 128, -1, 1)
    if row.scale == "ue8m0":
        exponents = scales[:, : numbers.shape[1]].astype(np.int32) - 127
        factors = np.ldexp(1.0, exponents)
    else:
        factors = numbers.astype(np.float64)
    values = values * np.repeat(factors, row.group, axis=1)
    rope = data[:, codes:].copy().view(np.uint16).astype(np.uint32) << 16
    rope = rope.view(np.float32).astype(np.float64)
    return np.concatenate([values, rope * factors[:, :1] if row.divides_rope else rope], axis=1)
