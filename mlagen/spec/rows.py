"""Rows of an FP8 or FP4 KV cache: the description of a format for readers and writers."""

from __future__ import annotations

from dataclasses import dataclass

CODE_BITS = {"e4m3": 8, "e2m1": 4}
CODE_MAX = {"e4m3": 448.0, "e2m1": 6.0}  # the largest number of a code
SCALE_BYTES = {"fp32": 4, "ue8m0": 1, "e4m3": 1}


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """How a token of an FP8 or FP4 KV cache is packed into bytes.

    The first elements of a token are codes with a scale for each group, the others are bf16. Its
    data row has the codes, inline scales if any, and the bf16 elements. Checks, CPU backend,
    writers, benchmark and ``mla_sm80`` follow the fields; sm90 kernels have fewer formats.
    """

    scaled_elements: int = 512  # the codes
    group: int  # codes for each scale
    code: str = "e4m3"  # or "e2m1", two in a byte, the first in its low half
    scale_code: str = "fp32"  # "ue8m0", "e4m3"
    # "inline": in the row behind the codes; "page": in the scale rows behind the data rows of the
    # page; or "tensor": in one of their own.
    scale_place: str = "tensor"
    scale_padding: int = 0  # bytes behind the scales of a token, of any value
    bf16_elements: tuple[int, ...] = (64,)  # numbers of bf16 elements that rows may have
    scales_bf16: bool = False  # whether the one scale of a token multiplies them, too
    min_scale_exponent: int = -126  # writers choose no scale below this power of two
    value_elements: int = 512  # the first elements of a token are its value, too
    is_named: bool = False  # by the call; other formats follow from the width of a cache
    holds_queries: bool = False  # the query of a call has such rows, too

    @property
    def has_inline_scales(self) -> bool:
        """Whether a data row has the scales of its token, behind the codes."""
        return self.scale_place == "inline"

    @property
    def has_scale_rows(self) -> bool:
        """Whether a page has a scale row for each token, behind all its data rows."""
        return self.scale_place == "page"

    @property
    def code_bits(self) -> int:
        """Bits of a code."""
        return CODE_BITS[self.code]

    @property
    def scales(self) -> int:
        """Scales of a token."""
        return self.scaled_elements // self.group

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a token."""
        return self.scaled_elements * self.code_bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a token with their padding; 0 in a tensor of their own."""
        if self.scale_place == "tensor":
            return 0
        return self.scales * SCALE_BYTES[self.scale_code] + self.scale_padding

    @property
    def code_max(self) -> float:
        """The largest number of a code, which the largest element of a group becomes."""
        return CODE_MAX[self.code]

    @property
    def min_scale(self) -> float:
        """The smallest scale that writers choose; readers take any."""
        return 2.0**self.min_scale_exponent

    @property
    def bf16_offset(self) -> int:
        """Bytes of a data row before its bf16 elements."""
        return self.code_bytes + (self.scale_bytes if self.has_inline_scales else 0)

    @property
    def head_dims(self) -> tuple[tuple[int, int], ...]:
        """``kv_lora_rank`` and ``qk_rope_head_dim`` of the calls over such rows."""
        totals = (self.scaled_elements + rest for rest in self.bf16_elements)
        return tuple((self.value_elements, total - self.value_elements) for total in totals)

    def data_bytes(self, elements: int) -> int:
        """Bytes of a data row of a token of ``elements``; of the longest, if none has so many."""
        rest = elements - self.scaled_elements
        return self.bf16_offset + 2 * (rest if self.has(elements) else max(self.bf16_elements))

    def row_bytes(self, elements: int) -> int:
        """Bytes of a token of ``elements`` in its page: data row and scale row."""
        return self.data_bytes(elements) + (self.scale_bytes if self.has_scale_rows else 0)

    def has(self, elements: int) -> bool:
        """Whether a token may have ``elements``."""
        return elements - self.scaled_elements in self.bf16_elements

    def fits(self, width: int, elements: int) -> bool:
        """Whether rows of ``width`` bytes are such rows, padded ones without bf16 included."""
        size = self.row_bytes(elements)
        is_padded = elements == self.scaled_elements and width > size
        return self.has(elements) and (width == size or is_padded)
