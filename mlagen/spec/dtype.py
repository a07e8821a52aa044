"""Data types of queries and KV caches, by the names in keys, commands and documentation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import combinations


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """How a token of an FP8 KV cache is packed into one row of bytes.

    A row has e4m3 latent elements, their fp32 scales, unless those are a tensor of their own, and
    bf16 rope elements. Kernels copy it in chunks of 16 bytes, and a chunk has one scale. Checks,
    ``mla_sm80``, the CPU backend and the benchmark follow the fields; ``mla_sm90_fp8kv`` has fewer
    formats.

    Raises
    ------
    ValueError
        If no kernel reads such rows.
    """

    latent_elements: int = 512
    scaled_elements: int  # latent elements for each scale
    has_inline_scales: bool = False  # between the latent and the rope elements
    scales_rope: bool = False  # whether the scale of a token multiplies its rope elements, too
    rope_sizes: tuple[int, ...] = (64,)  # rope elements that rows may have
    holds_queries: bool = False  # a call names the format, and its query has such rows, too

    def __post_init__(self) -> None:
        elements, scaled = self.latent_elements, self.scaled_elements
        if scaled % 16 or elements % scaled:
            rule = f"a multiple of 16 that divides {elements} (latent_elements)"
            raise ValueError(f"scaled_elements: expected {rule}, got {scaled}")
        if self.scales_rope and scaled != elements:
            rule = f"{elements} (latent_elements) with scales_rope"
            raise ValueError(f"scaled_elements: expected {rule}, got {scaled}")
        if not self.rope_sizes or not {64, 0}.issuperset(self.rope_sizes):
            raise ValueError(f"rope_sizes: expected 64 or 0, got {self.rope_sizes}")
        if (size := self.rope_offset) % 16:
            raise ValueError(f"bytes before the rope part: expected a multiple of 16, got {size}")

    @property
    def scales(self) -> int:
        """Scales of a token."""
        return self.latent_elements // self.scaled_elements

    @property
    def rope_offset(self) -> int:
        """Bytes of a row before its rope elements."""
        return self.latent_elements + (4 * self.scales if self.has_inline_scales else 0)

    def fits(self, width: int, rope_elements: int) -> bool:
        """Whether rows of ``width`` bytes are such rows, padded ones without rope included."""
        if rope_elements not in self.rope_sizes:
            return False
        size = self.row_bytes(rope_elements)
        return width == size or (rope_elements == 0 and width > size)

    def row_bytes(self, rope_elements: int) -> int:
        """Bytes of a row; of a row with rope elements, if none has so many."""
        is_known = rope_elements in self.rope_sizes
        return self.rope_offset + 2 * (rope_elements if is_known else max(self.rope_sizes))


class DType(Enum):
    """Storage format of a tensor; ``str(dtype)`` is its stable name."""

    BF16 = "bf16"
    FP16 = "fp16"
    E4M3 = "e4m3"
    INT8 = "int8"
    NVFP4 = "nvfp4"  # two e2m1 per byte; an e4m3 scale per 16 elements in a separate tensor
    FP8_DS_MLA = "fp8_ds_mla"  # DeepSeek-V3.2, FlashMLA
    FP8_PER_TOKEN = "fp8_per_token"  # noqa: S105 - Modular's, not a password

    def __str__(self) -> str:
        return self.value

    @property
    def row(self) -> RowFormat | None:
        """The format of a row with parts of their own types; None for a row of equal elements."""
        return ROW_FORMATS.get(self)

    @property
    def is_16bit(self) -> bool:
        """Whether the tensor cores read the stored format directly."""
        return self in (DType.BF16, DType.FP16)

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row of ``elements`` elements, inline scales included."""
        if self.row is not None:
            return self.row.row_bytes(elements - self.row.latent_elements)
        if self is DType.NVFP4:
            return elements // 2
        return elements * (2 if self.is_16bit else 1)

    @property
    def cuda_name(self) -> str:
        """Tag type of the elements in the templates; of a packed row, those of its latent part."""
        name = DType.E4M3.value if self.row is not None else self.value
        return name.capitalize()


ROW_FORMATS = {
    DType.FP8_DS_MLA: RowFormat(scaled_elements=128, has_inline_scales=True, rope_sizes=(64, 0)),
    DType.FP8_PER_TOKEN: RowFormat(scaled_elements=512, scales_rope=True, holds_queries=True),
}


def row_dtype_of(width: int, rope_elements: int) -> DType:
    """Return the packed format of uint8 rows, by their width; the first if none has it."""
    formats = {dtype: row for dtype, row in ROW_FORMATS.items() if not row.holds_queries}
    fitting = [dtype for dtype, row in formats.items() if row.fits(width, rope_elements)]
    return (*fitting, *formats)[0]


def require_distinct_rows(formats: dict[DType, RowFormat]) -> None:
    """Reject formats of uint8 rows if the width of a cache may be that of two.

    Raises
    ------
    ValueError
        The message names both.
    """
    named = [(dtype, row) for dtype, row in formats.items() if not row.holds_queries]
    for (one, row), (other, another) in combinations(named, 2):
        for rope in row.rope_sizes:
            width = max(row.row_bytes(rope), another.row_bytes(rope))
            if row.fits(width, rope) and another.fits(width, rope):
                rule = f"rows of other widths than those of {one}"
                raise ValueError(f"{other}: expected {rule}, got {width} bytes with rope {rope}")


require_distinct_rows(ROW_FORMATS)
