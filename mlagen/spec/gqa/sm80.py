"""Spec of the sm80 GQA decode kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from mlagen.spec.arch import Arch
from mlagen.spec.dtype import TOKEN_SCALE_BYTES
from mlagen.spec.fixed_splits import ROW_SPLITS_PARAMETERS, Sm80Splits
from mlagen.spec.gqa.variant import (
    PROBLEM_PARAMETERS,
    SCALE_PARAMETERS,
    SLICE_DIMS,
    GqaSpec,
    GqaVariant,
    require_supported,
)
from mlagen.spec.kernel import CallShape, Parameter, parameters

# KV tokens per warp and step.
WARP_TOKENS = 16


_WORK_BYTES = 80  # of the struct in kernels/gqa_sm80/work_item.cuh


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
class GqaSm80Spec(GqaSpec, Sm80Splits):
    """Everything that determines the cubin of an sm80 GQA decode kernel."""

    family: ClassVar[str] = "gqa_sm80"
    common_parameters: ClassVar[tuple[Parameter, ...]] = (
        *parameters(
            """
            const u16*: query
            const unsigned char*: key_cache value_cache key_scales value_scales
            const int*: block_tables seq_lens cu_seqlens_q kv_indptr
            const u32*: draft_mask
            const float*: bmm1_scale_tensor bmm2_scale_tensor sinks
            unsigned char*: out
            float*: lse partial_out partial_lse
            i64: query_stride query_head_stride key_page_stride key_token_stride key_head_stride
                value_page_stride value_token_stride value_head_stride key_scale_page_stride
                key_scale_token_stride key_scale_head_stride value_scale_page_stride
                value_scale_token_stride value_scale_head_stride total_rows
            """
        ),
        *PROBLEM_PARAMETERS,
        *parameters("int: m_tiles num_splits"),
        *SCALE_PARAMETERS,
    )

    warp_tokens: ClassVar[int] = WARP_TOKENS

    tile: GqaTile

    @property
    def added_parameters(self) -> tuple[Parameter, ...]:
        """Parameters of this variant besides the common ones."""
        added = ROW_SPLITS_PARAMETERS if self.variant.batch_invariant else ()
        return (*super().added_parameters, *added)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the key of a cached token of one KV head."""
        return self.variant.kv_dtype.row_bytes(self.variant.head_dim)

    @property
    def slice_bytes(self) -> int:
        """Bytes of the part of a value that a CTA loads."""
        return self.variant.kv_dtype.row_bytes(self.slice_dims)

    @property
    def slices(self) -> int:
        """CTAs that share the output elements of a row."""
        return -(-self.head_dim_vo // SLICE_DIMS)

    @property
    def slice_dims(self) -> int:
        """Output elements per CTA."""
        return self.head_dim_vo // self.slices

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
        stored = self.stored_bytes + (TOKEN_SCALE_BYTES if self.variant.has_token_scales else 0)
        ring = warps * stages * WARP_TOKENS * (stored if self.dequants_kv else row)
        if self.dequants_kv:
            ring += warps * WARP_TOKENS * row
        combined = rows * (self.slice_dims + 4) * 4
        words = 2 * warps * rows + warps * rows * WARP_TOKENS
        return _WORK_BYTES + rows * row + max(ring, combined) + words * 4


def gqa_sm80_spec(arch: Arch, variant: GqaVariant, rows: int) -> GqaSm80Spec:
    """Return the kernel for ``rows`` query rows (heads per KV head times query tokens).

    Raises UnsupportedError if no row of :data:`SUPPORTED` covers the variant, or its head dim is
    unsupported.
    """
    require_supported(variant)
    specs = [GqaSm80Spec(arch=arch, variant=variant, tile=tile) for tile in TILES]
    fitting = [spec for spec in specs if _fits(spec)]
    sizes = sorted({spec.tile.block_m for spec in fitting})
    chosen = next((size for size in sizes if size >= rows), sizes[-1])
    return next(spec for spec in fitting if spec.tile.block_m == chosen)


def _fits(spec: GqaSm80Spec) -> bool:
    # Two groups of 16 rows need twice the accumulator registers of 256 output elements.
    if spec.tile.block_m == 32 and spec.slice_dims > 128:
        return False
    return spec.arch.fits(spec.shared_bytes, spec.tile.ctas_per_sm)
