"""Data types of queries and KV caches, by the names in keys, commands and documentation."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from mlagen.spec.rows import RowFormat


class DType(Enum):
    """Storage format of a tensor; ``str(dtype)`` is its stable name."""

    BF16 = "bf16"
    FP16 = "fp16"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    INT8 = "int8"
    NVFP4 = "nvfp4"  # two e2m1 per byte; an e4m3 scale per 16 elements in a separate tensor
    # With an fp32 scale for each token and KV head, of keys and of values: vLLM, and FlashInfer's
    # use_token_head_sf.
    INT8_PER_TOKEN_HEAD = "int8_per_token_head"  # noqa: S105 - not a password
    FP8_PER_TOKEN_HEAD = "fp8_per_token_head"  # noqa: S105 - not a password
    FP8_E5M2_PER_TOKEN_HEAD = "fp8_e5m2_per_token_head"  # noqa: S105 - not a password
    FP8_DS_MLA = "fp8_ds_mla"  # DeepSeek-V3.2, FlashMLA
    FP8_PER_TOKEN = "fp8_per_token"  # noqa: S105 - Modular's, not a password
    # DeepSeek-V4, FlashMLA; DeepSeek-V4.1, with a second pool in FP8 or FP4.
    FP8_DSV4 = "fp8_dsv4"
    FP8_DSV41 = "fp8_dsv41"
    FP8_DSV41_FP4_CA = "fp8_dsv41_fp4_ca"
    FP8_DSV41_INLINE = "fp8_dsv41_inline"
    FP8_DSV41_INLINE_FP4_CA = "fp8_dsv41_inline_fp4_ca"

    def __str__(self) -> str:
        return self.value

    @property
    def row(self) -> RowFormat | None:
        """The format of a row with parts of their own types; None for a row of equal elements."""
        return ROW_FORMATS.get(self)

    @property
    def extra_row(self) -> RowFormat | None:
        """The format of a row of the second pool; None without one."""
        return EXTRA_ROW_FORMATS.get(self)

    @property
    def has_token_scales(self) -> bool:
        """Whether each token and KV head has a scale."""
        return self in TOKEN_HEAD_ELEMENTS

    @property
    def element(self) -> DType:
        """The format of the elements, without scales of tokens."""
        return TOKEN_HEAD_ELEMENTS.get(self, self)

    @property
    def is_16bit(self) -> bool:
        """Whether the tensor cores read the stored format directly."""
        return self in (DType.BF16, DType.FP16)

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row of ``elements`` elements, inline scales included."""
        if self.row is not None:
            return self.row.row_bytes(elements)
        if self is DType.NVFP4:
            return elements // 2
        return elements * self.unit_bytes

    @property
    def unit_bytes(self) -> int:
        """Bytes of the smallest part of a row with an address: an element, or several in a byte."""
        return 2 if self.is_16bit else 1

    @property
    def cuda_name(self) -> str:
        """Tag type of the elements in the templates; of a packed row, that of its codes."""
        name = self.row.code if self.row is not None else self.element.value
        return name.capitalize()


TOKEN_HEAD_ELEMENTS = {
    DType.INT8_PER_TOKEN_HEAD: DType.INT8,
    DType.FP8_PER_TOKEN_HEAD: DType.E4M3,
    DType.FP8_E5M2_PER_TOKEN_HEAD: DType.E5M2,
}
TOKEN_SCALE_BYTES = 4  # fp32

DSV4_ROW = RowFormat(
    scaled_elements=448,
    group=64,
    scale_code="ue8m0",
    scale_place="page",
    scale_padding=1,
    min_scale_exponent=-22,  # vLLM's: that of a group whose largest element is 1e-4
    is_named=True,
)
DSV41_ROW = RowFormat(
    group=32,
    scale_code="ue8m0",
    scale_place="page",
    min_scale_exponent=-13,  # FlashMLA's and FlashInfer's: 1e-4, rounded up
    bf16_elements=(0,),
    is_named=True,
)
DSV41_FP4_ROW = replace(
    DSV41_ROW,
    code="e2m1",
    group=16,
    scale_code="e4m3",
    min_scale_exponent=-9,  # the smallest of e4m3
)
DSV41_INLINE_ROW = replace(DSV41_ROW, scale_place="inline")
DSV41_INLINE_FP4_ROW = replace(DSV41_FP4_ROW, scale_place="inline")

ROW_FORMATS = {
    DType.FP8_DS_MLA: RowFormat(group=128, scale_place="inline", bf16_elements=(64, 0)),
    DType.FP8_PER_TOKEN: RowFormat(
        group=512,
        scales_bf16=True,
        min_scale_exponent=-64,  # rope elements up to 2^63, divided by it, are finite
        is_named=True,
        holds_queries=True,
    ),
    DType.FP8_DSV4: DSV4_ROW,
    DType.FP8_DSV41: DSV41_ROW,
    DType.FP8_DSV41_FP4_CA: DSV41_ROW,
    DType.FP8_DSV41_INLINE: DSV41_INLINE_ROW,
    DType.FP8_DSV41_INLINE_FP4_CA: DSV41_INLINE_ROW,
}
# Of the second pool, of compressed tokens.
EXTRA_ROW_FORMATS = {
    DType.FP8_DSV4: DSV4_ROW,
    DType.FP8_DSV41: DSV41_ROW,
    DType.FP8_DSV41_FP4_CA: DSV41_FP4_ROW,
    DType.FP8_DSV41_INLINE: DSV41_INLINE_ROW,
    DType.FP8_DSV41_INLINE_FP4_CA: DSV41_INLINE_FP4_ROW,
}


def row_dtype_of(width: int, elements: int) -> DType:
    """Return the packed format of uint8 rows, by their width; the first if none has it."""
    formats = {dtype: row for dtype, row in ROW_FORMATS.items() if not row.is_named}
    fitting = [dtype for dtype, row in formats.items() if row.fits(width, elements)]
    return (*fitting, *formats)[0]
