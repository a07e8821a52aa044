"""Spec of the sm80 GQA decode kernels, and the support table of all GQA kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, NamedTuple

from mlagen.errors import UnsupportedError
from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import (
    CallShape,
    KernelSpec,
    Parameter,
    Variant,
    float32,
    int32,
    int64,
    pointer,
)

# KV tokens per warp and step.
WARP_TOKENS = 16

# Max output elements per CTA; a wider head is sliced over several CTAs.
SLICE_DIMS = 256


_WORK_BYTES = 80  # of the struct in kernels/gqa_sm80/work_item.cuh


@dataclass(frozen=True, kw_only=True)
class GqaVariant(Variant):
    """Kernel properties that a GQA decode call determines; the tile is selected separately."""

    query_dtype: DType
    kv_dtype: DType
    out_dtype: DType
    head_dim: int = 128
    page_size: int = 64  # tokens


class GqaTile(NamedTuple):
    """CTA tile: query rows (BLOCK_M), warps, and pipeline stages per warp.

    A stage holds K or V of :data:`WARP_TOKENS` tokens.
    """

    block_m: int
    warps: int
    stages: int
    ctas_per_sm: int


# For each BLOCK_M, the first tile that fits the architecture is used.
TILES = (
    #    rows warps stages ctas_per_sm
    GqaTile(32, 4, 6, 2),
    GqaTile(32, 4, 4, 1),
    GqaTile(16, 4, 6, 2),
    GqaTile(16, 4, 6, 1),
    GqaTile(16, 4, 4, 1),
    GqaTile(16, 2, 3, 1),
    GqaTile(16, 2, 2, 1),
)


@dataclass(frozen=True, kw_only=True)
class GqaSupport:
    """One row of :data:`SUPPORTED`; every combination of its values has a kernel."""

    query_dtype: DType
    kv_dtype: DType
    out_dtypes: tuple[DType, ...]


_16BIT_DTYPES = (DType.BF16, DType.FP16)
SUPPORTED = tuple(
    GqaSupport(
        query_dtype=query,
        kv_dtype=kv or query,
        out_dtypes=(query, DType.E4M3) if kv is DType.E4M3 else (query,),
    )
    for query, kv in product(_16BIT_DTYPES, (None, DType.E4M3, DType.INT8, DType.NVFP4))
)

# Values that prewarming compiles. Other multiples of 16 up to 256, and other page sizes, are
# compiled on first use.
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
_MAX_HEAD_DIM = 512


@dataclass(frozen=True, kw_only=True)
class GqaSpec(KernelSpec):
    """Base spec of the GQA decode kernels."""

    variant: GqaVariant

    @property
    def dequants_kv(self) -> bool:
        """Whether the KV cache is converted to another type before the MMA."""
        return not self.variant.kv_dtype.is_16bit

    @property
    def stores_e4m3(self) -> bool:
        """Whether the output is e4m3."""
        return self.variant.out_dtype is DType.E4M3


@dataclass(frozen=True, kw_only=True)
class GqaSm80Spec(GqaSpec):
    """Everything that determines the cubin of an sm80 GQA decode kernel."""

    family: ClassVar[str] = "gqa_sm80"
    symbol: ClassVar[str] = "gqa_sm80"
    template: ClassVar[str] = "kernels/gqa_sm80/kernel.cu.j2"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        pointer("query", "const u16"),
        pointer("key_cache", "const unsigned char"),
        pointer("value_cache", "const unsigned char"),
        pointer("key_scales", "const unsigned char"),
        pointer("value_scales", "const unsigned char"),
        pointer("block_tables", "const int"),
        pointer("seq_lens", "const int"),
        pointer("cu_seqlens_q", "const int"),
        pointer("draft_mask", "const u32"),
        pointer("bmm1_scale_tensor", "const float"),
        pointer("bmm2_scale_tensor", "const float"),
        pointer("sinks", "const float"),
        pointer("out", "unsigned char"),
        pointer("partial_out", "float"),
        pointer("partial_lse", "float"),
        int64("query_stride"),
        int64("query_head_stride"),
        int64("key_page_stride"),
        int64("key_token_stride"),
        int64("key_head_stride"),
        int64("value_page_stride"),
        int64("value_token_stride"),
        int64("value_head_stride"),
        int64("key_scale_page_stride"),
        int64("key_scale_token_stride"),
        int64("key_scale_head_stride"),
        int64("value_scale_page_stride"),
        int64("value_scale_token_stride"),
        int64("value_scale_head_stride"),
        int64("total_rows"),
        int32("num_seqs"),
        int32("kv_heads"),
        int32("group_size"),
        int32("q_len"),
        int32("mask_words"),
        int32("window"),
        int32("max_pages"),
        int32("block_tables_stride"),
        int32("num_pages"),
        int32("row_tiles"),
        int32("num_splits"),
        int32("bmm2_scales_scores"),
        float32("bmm1_scale"),
        float32("bmm2_scale"),
        float32("score_factor"),
        float32("output_factor"),
    )

    tile: GqaTile

    @property
    def warp_tokens(self) -> int:
        """KV tokens per warp and step."""
        return WARP_TOKENS

    @property
    def stored_bytes(self) -> int:
        """Bytes of a cached token of one KV head."""
        return self.variant.kv_dtype.row_bytes(self.variant.head_dim)

    @property
    def slices(self) -> int:
        """CTAs that share the output elements of a row."""
        return -(-self.variant.head_dim // SLICE_DIMS)

    @property
    def slice_dims(self) -> int:
        """Output elements per CTA."""
        return self.variant.head_dim // self.slices

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return self.tile.warps * 32

    @property
    def block_n(self) -> int:
        """KV tokens per CTA and step."""
        return self.tile.warps * WARP_TOKENS

    def serves(self, call: CallShape) -> bool:
        """Whether the call uses this tile of the variant."""
        if call.kv_heads is None:
            return True
        rows = call.heads // call.kv_heads * call.q_len
        return self == gqa_sm80_spec(self.arch, self.variant, rows)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA, laid out by kernels/gqa_sm80/work_item.cuh."""
        rows, warps, stages, _ = self.tile
        row = self.variant.head_dim * 2 + 16
        ring = warps * stages * WARP_TOKENS * (self.stored_bytes if self.dequants_kv else row)
        if self.dequants_kv:
            ring += warps * WARP_TOKENS * row
        combined = rows * (self.slice_dims + 4) * 4
        words = 2 * warps * rows + warps * rows * WARP_TOKENS
        return _WORK_BYTES + rows * row + max(ring, combined) + words * 4


def gqa_sm80_spec(arch: Arch, variant: GqaVariant, rows: int) -> GqaSm80Spec:
    """Return the kernel for ``rows`` query rows (heads per KV head times query tokens).

    Raises
    ------
    UnsupportedError
        If no row of :data:`SUPPORTED` covers the variant, or its head dim is unsupported.
    """
    require_supported(variant)
    specs = [GqaSm80Spec(arch=arch, variant=variant, tile=tile) for tile in TILES]
    fitting = [spec for spec in specs if _fits(spec)]
    sizes = sorted({spec.tile.block_m for spec in fitting})
    chosen = next((size for size in sizes if size >= rows), sizes[-1])
    return next(spec for spec in fitting if spec.tile.block_m == chosen)


def gqa_variants() -> Iterator[GqaVariant]:
    """Yield every variant that prewarming covers."""
    for row, head_dim, page_size in product(SUPPORTED, HEAD_DIMS, PAGE_SIZES):
        for out_dtype in row.out_dtypes:
            yield GqaVariant(
                query_dtype=row.query_dtype,
                kv_dtype=row.kv_dtype,
                out_dtype=out_dtype,
                head_dim=head_dim,
                page_size=page_size,
            )


def gqa_sm80_specs(arch: Arch) -> Iterator[GqaSm80Spec]:
    """Yield every sm80 GQA kernel that prewarming covers for ``arch``, each once."""
    for variant in gqa_variants():
        yield from {gqa_sm80_spec(arch, variant, rows): None for rows in (16, 32)}


def _fits(spec: GqaSm80Spec) -> bool:
    # Two groups of 16 rows need twice the accumulator registers of 256 output elements.
    if spec.tile.block_m == 32 and spec.slice_dims > 128:
        return False
    return spec.arch.fits(spec.shared_bytes, spec.tile.ctas_per_sm)


def require_supported(variant: GqaVariant) -> None:
    """Reject a variant that no row of :data:`SUPPORTED` covers.

    Raises
    ------
    UnsupportedError
        The message lists the supported values.
    """
    head_dim = variant.head_dim
    if not (head_dim % 16 == 0 and 16 <= head_dim <= SLICE_DIMS) and head_dim != _MAX_HEAD_DIM:
        raise UnsupportedError(
            f"no GQA decode kernel for head_dim {head_dim}; supported: multiples of 16 up to "
            f"{SLICE_DIMS}, and {_MAX_HEAD_DIM}"
        )
    dtypes = (variant.query_dtype, variant.kv_dtype, variant.out_dtype)
    known = [
        (row.query_dtype, row.kv_dtype, out_dtype)
        for row in SUPPORTED
        for out_dtype in row.out_dtypes
    ]
    if dtypes not in known:
        listed = "; ".join(f"query {q}, cache {kv}, output {out}" for q, kv, out in known)
        raise UnsupportedError(
            f"no GQA decode kernel for query {dtypes[0]}, cache {dtypes[1]}, output {dtypes[2]}; "
            f"supported: {listed}"
        )
