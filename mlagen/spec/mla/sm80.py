"""Spec of the sm80 MLA decode kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.fixed_splits import ROW_SPLITS_PARAMETERS, Sm80Splits
from mlagen.spec.kernel import Parameter, parameters
from mlagen.spec.mla.variant import MlaKernelSpec, MlaVariant, require_supported


class MlaTile(NamedTuple):
    """CTA tile and warp layout; docs/explanation/mla-sm80-kernel.md explains the choice."""

    block_m: int
    block_n: int
    stages: int
    row_warps: int
    token_warps: int
    dim_warps: int
    ctas_per_sm: int


# Largest BLOCK_M first. A call uses the smallest tile that holds the rows of a sequence, or else
# the largest that fits the architecture's shared memory; a small one over two pools the smallest.
TILES = (
    #    rows tokens stages row_warps token_warps dim_warps ctas_per_sm
    MlaTile(64, 64, 2, 2, 4, 2, 1),
    MlaTile(32, 64, 2, 2, 4, 2, 1),
    MlaTile(32, 32, 3, 2, 2, 1, 1),
    MlaTile(32, 32, 3, 2, 4, 1, 1),
    MlaTile(16, 32, 2, 1, 4, 1, 2),
    MlaTile(16, 32, 3, 1, 4, 1, 1),
    MlaTile(16, 32, 2, 1, 4, 1, 1),
)

SMALL_TILE_ROWS = 16  # of the smallest tile

# KV blocks of 64 tokens of a small call over two pools, over all of its smallest tiles, on 132 SMs.
# Up to so many, they are faster than fewer CTAs of a larger tile, and than the sm90 kernel.
MAX_SMALL_KV_BLOCKS = 60

_WORK_BYTES = 64  # of the struct in kernels/mla_sm80/work_item.cuh


@dataclass(frozen=True, kw_only=True)
class MlaSm80Spec(MlaKernelSpec, Sm80Splits):
    """Everything that determines the cubin of an sm80 MLA decode kernel."""

    family: ClassVar[str] = "mla_sm80"
    common_parameters: ClassVar[tuple[Parameter, ...]] = parameters(
        """
        const unsigned char*: query query_rope
        const float*: query_scales
        const unsigned char*: cache rope_cache value_cache
        const float*: kv_scales
        const int*: block_tables value_tables kv_indptr seq_lens cu_seqlens_q topk_length
        const float*: bias bmm1_scale_tensor bmm2_scale_tensor sinks
        u16*: out
        float*: lse partial_out partial_lse
        i64: query_stride query_head_stride query_rope_stride query_rope_head_stride page_stride
            token_stride rope_page_stride rope_token_stride scale_page_stride scale_token_stride
            bias_stride bias_head_stride total_rows
        int: num_seqs heads q_len max_pages block_tables_stride num_pages m_tiles num_splits
            topk is_causal bmm2_scales_scores
        float: bmm1_scale bmm2_scale latent_scale rope_scale lse_factor
        """
    )

    tile: MlaTile

    @property
    def added_parameters(self) -> tuple[Parameter, ...]:
        """Parameters of this kernel besides the common ones."""
        added = ROW_SPLITS_PARAMETERS if self.variant.batch_invariant else ()
        return (*super().added_parameters, *added)

    @property
    def math_dtype(self) -> DType:
        """Element type of the MMA; bf16 and fp16 both represent e4m3 exactly.

        With scales of KV tokens it is bf16, since fp16 would overflow.
        """
        query, kv = self.variant.query_dtype, self.variant.kv_dtype
        if query.is_16bit:
            return query
        return DType.FP16 if (query, kv) == (DType.E4M3, DType.E4M3) else DType.BF16

    @property
    def dequants_kv(self) -> bool:
        """Whether KV tokens are copied to shared memory as stored and converted there."""
        return not self.variant.kv_dtype.is_16bit

    @property
    def dequants_query(self) -> bool:
        """Whether the query is converted on its way to shared memory."""
        return not self.variant.query_dtype.is_16bit

    @property
    def has_separate_values(self) -> bool:
        """Whether V has a cache of its own."""
        return self.variant.values == "separate"

    @property
    def has_bias(self) -> bool:
        """Whether an additive bias is applied to the scores."""
        return self.variant.mask == "bias"

    @property
    def stage_row_bytes(self) -> int:
        """Bytes of a token in a stage, whole chunks: its row, with the scales behind if apart.

        Of two pools, those of the longer row.
        """
        rows = [row for row in (self.row, self.extra_row) if row is not None]
        size = max((row.row_bytes(self.head_dim_qk) for row in rows), default=self.stored_bytes)
        if self.row is None or self.row.scale_place == "tensor":
            size += self.scales * 4
        return -(-size // 16) * 16

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return self.tile.row_warps * self.tile.token_warps * 32

    def serves_rows(self, rows: int) -> bool:
        """Whether calls with so many query rows per sequence may use this tile of the variant."""
        return self in mla_sm80_specs(self.arch, self.variant, rows)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA, laid out by kernels/mla_sm80/work_item.cuh."""
        rows, tokens, stages = self.tile[:3]
        tile_bytes = (rows * self.head_dim_qk + rows * tokens) * 2
        tile_bytes += stages * tokens * self.stage_row_bytes
        if self.dequants_kv:
            tile_bytes += tokens * self.head_dim_qk * 2
        words = rows * (self.tile.token_warps + 3) + tokens
        return tile_bytes + words * 4 + _WORK_BYTES


def mla_sm80_spec(arch: Arch, variant: MlaVariant, rows: int) -> MlaSm80Spec:
    """Return the kernel for ``rows`` query rows per sequence (heads times query tokens).

    Raises UnsupportedError if no row of :data:`SUPPORTED` covers the variant.
    """
    require_supported(variant)
    choices = _choices(arch, variant)
    return next((spec for spec in choices[::-1] if spec.tile.block_m >= rows), choices[0])


def mla_sm80_specs(arch: Arch, variant: MlaVariant, rows: int) -> list[MlaSm80Spec]:
    """Return the kernels for ``rows`` query rows per sequence: of most calls, and of small ones."""
    specs = [mla_sm80_spec(arch, variant, rows)]
    if variant.has_small_tiles:
        specs.append(mla_sm80_spec(arch, variant, min(rows, SMALL_TILE_ROWS)))
    return list(dict.fromkeys(specs))


@lru_cache(maxsize=1 << 14)  # for each number of rows
def _choices(arch: Arch, variant: MlaVariant) -> list[MlaSm80Spec]:
    """Return the first valid tile of each BLOCK_M, largest first."""
    choices: dict[int, MlaSm80Spec] = {}
    for tile in TILES:
        spec = MlaSm80Spec(arch=arch, variant=variant, tile=tile)
        if tile.block_m not in choices and _is_valid(spec):
            choices[tile.block_m] = spec
    assert choices, f"no tile fits {arch}"
    return list(choices.values())


def _is_valid(spec: MlaSm80Spec) -> bool:
    tile = spec.tile
    has_extras = spec.is_sparse or spec.has_bias or spec.has_separate_values
    # Tiles of 64 rows have registers for the plain main loop only.
    if (has_extras or spec.scales > 1) and tile.block_m > 32:
        return False
    if (has_extras or spec.dequants_kv) and (tile.block_m, spec.threads) == (32, 128):
        return False
    # A separate V would overwrite the stage through which warps exchange partial scores.
    if spec.has_separate_values and tile.dim_warps > 1:
        return False
    # Warps exchange partial scores through the part of a stage that one round of copies fills.
    round_bytes = spec.threads // 8 * spec.stage_row_bytes
    if tile.dim_warps > 1 and tile.block_m * tile.block_n * 4 > round_bytes:
        return False
    if spec.head_dim_vo // (spec.threads // 32) % 16:
        return False
    return spec.arch.fits(spec.shared_bytes, tile.ctas_per_sm)
