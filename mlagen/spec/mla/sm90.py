"""Specs of the sm90 MLA decode kernels: 16-bit, FP8, and over an FP8 KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.fixed_splits import MLA_SM90_PARAMETERS, MlaSm90Splits
from mlagen.spec.kernel import Parameter, parameters
from mlagen.spec.mla.sm80 import MAX_SMALL_KV_BLOCKS, SMALL_TILE_ROWS
from mlagen.spec.mla.variant import (
    DCP,
    GATHER_PARAMETERS,
    PLAIN,
    SPARSE,
    TWO_POOLS,
    MlaKernelSpec,
    MlaVariant,
)

SpecT = TypeVar("SpecT", bound="MlaSm90Spec")

# BLOCK_M of the tiles, largest first. A call uses the smallest tile that holds the rows of a
# sequence, or else the largest.
BLOCK_MS = (64, 32, 16)

# Device memory beside a workspace: one semaphore per SM; then the cached scheduler metadata, which
# is the schedule id, the sequence lengths and the initial work of each CTA, in whole cache lines:
# twice as many in batch-invariant kernels.
SEMAPHORE_BYTES = 1024
CACHED_SEQ_LENS = 510
SCHED_META_BYTES = 128
SCHED_META_OFFSET = SEMAPHORE_BYTES + (2 + CACHED_SEQ_LENS) * 4

HEAD_DIMS = ((512, 64), (512, 0))  # kv_lora_rank, qk_rope_head_dim

_TMA_PARAMETERS = parameters(
    """
    TensorMap: latent_map rope_map kv_map
    int: separate_rope
    """
)

_MAX_SWAP_AB_ROWS = 32
_TILE_ELEMENTS = 64  # of a row of 16-bit elements, 128 bytes
_MIN_BOX_TOKENS = 16
# Query and KV cache of the kernels over an FP8 KV cache.
_FP8KV_DTYPES = (
    (DType.BF16, DType.E4M3),
    (DType.BF16, DType.FP8_DS_MLA),
    (DType.E4M3, DType.E4M3),
    (DType.E4M3, DType.FP8_DS_MLA),
    (DType.FP8_PER_TOKEN, DType.FP8_PER_TOKEN),
)


@dataclass(frozen=True, kw_only=True)
class MlaSm90Spec(MlaKernelSpec, MlaSm90Splits):
    """Everything that determines the cubin of an sm90 MLA decode kernel in bf16 or fp16."""

    family: ClassVar[str] = "mla_sm90"
    common_parameters: ClassVar[tuple[Parameter, ...]] = parameters(
        """
        TensorMap: latent_map rope_map kv_map
        const unsigned char*: query query_rope cache
        const int*: block_tables kv_indptr seq_lens cu_seqlens_q
        const float*: bmm1_scale_tensor bmm2_scale_tensor sinks
        u16*: out
        float*: lse
        unsigned char*: partial_out partial_states
        u32*: semaphores
        i64: query_stride query_head_stride query_rope_stride query_rope_head_stride page_stride
            token_stride total_rows
        int: num_seqs heads q_len max_pages block_tables_stride num_pages num_cta_groups
            cta_group_size separate_rope is_causal bmm2_scales_scores schedule_id
        float: bmm1_scale bmm2_scale lse_factor
        """
    )

    # A CTA waits for the splits of its work tile that other CTAs compute.
    is_cooperative: ClassVar[bool] = True
    is_persistent: ClassVar[bool] = True
    uses_semaphores: ClassVar[bool] = True

    # (BLOCK_M, KV blocks per SM): calls with more rows use the smaller tile while the KV blocks of
    # all its tiles do not exceed the limit.
    smaller_tiles: ClassVar[tuple[tuple[int, int], ...]] = ((16, 2),)

    # The stream-K schedule counts in KV blocks of so many tokens. Its overheads are latencies, the
    # same for any SM count.
    block_n: ClassVar[int] = 64
    split_overhead_blocks: ClassVar[int] = 5  # of combining splits at all
    min_blocks_per_range: ClassVar[int] = 2  # overhead blocks included
    # The SMs of a full GH100: shared memory holds the partial states of as many splits.
    max_ranges: ClassVar[int] = 144
    partial_state_bytes: ClassVar[int] = 16  # per row of a split
    semaphore_bytes: ClassVar[int] = SEMAPHORE_BYTES  # the cached scheduler metadata follows them
    cached_seq_lens: ClassVar[int] = CACHED_SEQ_LENS

    # Warps of the producer warpgroup, and of a QK warpgroup.
    producer_warps: ClassVar[int] = 4

    block_m: int

    @classmethod
    def covers(cls, arch: Arch, variant: MlaVariant) -> bool:
        """Whether ``arch`` has kernels of this family for a variant."""
        is_16bit = variant.query_dtype.is_16bit and variant.kv_dtype is variant.query_dtype
        return is_16bit and (_supports_tma(arch, variant) or _has_kernels(arch, variant, SPARSE))

    @classmethod
    def of(  # noqa: PYI019 - Self is of Python 3.11
        cls: type[SpecT], arch: Arch, variant: MlaVariant, rows: int
    ) -> SpecT | None:
        """Return the kernel for ``rows`` query rows per sequence, or None if unsupported.

        In a sparse call every query token is a sequence of its own.
        """
        is_covered = cls.covers(arch, variant)
        return cls(arch=arch, variant=variant, block_m=block_m_for(rows)) if is_covered else None

    def max_small_blocks(self, rows: int, kv_blocks: int) -> int:  # noqa: ARG002 - of a subclass
        """Return up to how many KV blocks sm80 runs calls faster on 132 SMs, or -1.

        KV blocks of all sequences count once per tile of 16 rows. A sequence has ``rows`` query
        rows and ``kv_blocks`` KV blocks.
        """
        if rows <= SMALL_TILE_ROWS:
            return 64 if self.is_sparse else 256
        return 128 if rows <= 32 and not self.is_sparse else -1

    @property
    def swap_ab(self) -> bool:
        """Whether the MMAs swap A and B: KV tokens are the M dimension."""
        return self.block_m <= _MAX_SWAP_AB_ROWS

    @property
    def needs_one_wave(self) -> bool:
        """Whether smaller tiles must not outnumber the SMs: short lists are mostly overhead."""
        return self.has_two_pools

    @property
    def folder(self) -> str:
        """Folder of one of the two kernels."""
        return f"kernels/mla_sm90/{'swap_ab' if self.swap_ab else 'seesaw'}"

    @property
    def fixed_overhead_blocks(self) -> int:
        """Prologue and epilogue of a work tile, in KV blocks."""
        return 2 if self.swap_ab else 6

    @property
    def sched_meta_bytes(self) -> int:
        """Bytes of the cached scheduler metadata of one CTA."""
        return SCHED_META_BYTES * (2 if self.variant.batch_invariant else 1)

    @property
    def calls_combine(self) -> bool:
        """Whether the combine of fixed splits is a call: the PV loop has few registers."""
        return True

    @property
    def math_dtype(self) -> DType:
        """Element type of the MMA."""
        return self.variant.query_dtype

    @property
    def p_dtype(self) -> DType:
        """Element type of P in the PV GEMM."""
        return self.math_dtype

    @property
    def uses_tma(self) -> bool:
        """Whether TMA loads the KV tiles; otherwise producer warps gather the tokens."""
        return not self.is_sparse

    @property
    def added_parameters(self) -> tuple[Parameter, ...]:
        """Parameters of this kernel besides the common ones."""
        gather = GATHER_PARAMETERS if self.is_sparse else ()
        splits = MLA_SM90_PARAMETERS if self.variant.batch_invariant else ()
        return (*gather, *super().added_parameters, *splits)

    @property
    def unused_parameters(self) -> tuple[Parameter, ...]:
        """Those of TMA, over top-k indices."""
        return _TMA_PARAMETERS if self.is_sparse else ()

    @property
    def loading_warps(self) -> int:
        """Producer warps that load KV; beside TMA the others are scheduler warps."""
        if not self.uses_tma:
            return 4
        return 1 if self.swap_ab else 2

    @property
    def consumer_registers(self) -> int:
        """Registers per consumer thread; with swap-AB the 128 of the launch suffice for all."""
        if self.swap_ab:
            return 128
        return 216 if self.is_sparse else 224

    @property
    def producer_registers(self) -> int:
        """Registers per producer thread, which gives most of the 168 of the launch away."""
        return 128 if self.swap_ab else 3 * 168 - 2 * self.consumer_registers

    @property
    def box_tokens(self) -> int:
        """Tokens per TMA box, all of one page."""
        return math.gcd(self.variant.page_size, self.block_n)

    @property
    def pv_warps(self) -> int:
        """Warps of the consumer warpgroups, each of which has a part of the PV GEMM."""
        return 4 if self.swap_ab else 8

    @property
    def copies_tile_groups(self) -> bool:
        """Whether one TMA copy loads a stage, a part of a KV block; the last includes rope."""
        return self.swap_ab

    @property
    def tiles_per_stage(self) -> int:
        """Tiles of K in a stage; with swap-AB a third of nine, or half of eight without rope."""
        tiles = self.head_dim_qk // _TILE_ELEMENTS
        if not self.swap_ab:
            return tiles
        return tiles // (2 if tiles % 3 else 3)

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return (self.pv_warps + self.producer_warps) * 32

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA: the architecture's limit."""
        return self.arch.shared_bytes

    def serves_rows(self, rows: int) -> bool:
        """Whether calls with so many query rows per sequence may use this tile of the variant."""
        return self.block_m in self.tiles_of(rows)

    def tiles_of(self, rows: int) -> tuple[int, ...]:
        """Return the BLOCK_M of every tile for ``rows`` query rows per sequence."""
        default = block_m_for(rows)
        return (*(tile for tile, _ in self.smaller_tiles if tile < default), default)


@dataclass(frozen=True, kw_only=True)
class _Fp8Spec(MlaSm90Spec):
    """Base of the FP8 families, whose QK GEMM and softmax have a warpgroup of their own."""

    smaller_tiles: ClassVar[tuple[tuple[int, int], ...]] = ((16, 3), (32, 6))
    producer_warps: ClassVar[int] = 8

    @property
    def folder(self) -> str:
        """Folder of the kernel's own templates."""
        return f"kernels/{self.family}"

    @property
    def loading_warps(self) -> int:
        """Producer warps that load KV; beside TMA the others are scheduler warps."""
        return 1 if self.uses_tma else 4

    @property
    def pv_warps(self) -> int:
        """Warps of the PV warpgroups."""
        return 8


@dataclass(frozen=True, kw_only=True)
class MlaSm90Fp8Spec(_Fp8Spec):
    """Everything that determines the cubin of a kernel with query and KV cache in e4m3."""

    family: ClassVar[str] = "mla_sm90_fp8"

    @classmethod
    def covers(cls, arch: Arch, variant: MlaVariant) -> bool:
        """Whether ``arch`` has kernels of this family for a variant."""
        is_e4m3 = (variant.query_dtype, variant.kv_dtype) == (DType.E4M3, DType.E4M3)
        return is_e4m3 and _supports_tma(arch, variant)

    def max_small_blocks(self, rows: int, kv_blocks: int) -> int:  # noqa: ARG002
        """Return up to how many KV blocks sm80 runs calls faster on 132 SMs, or -1."""
        return 64 if rows <= SMALL_TILE_ROWS else -1

    @property
    def copies_tile_groups(self) -> bool:
        """Whether one TMA copy loads a part of a KV block: never, but all tiles or one."""
        return False


@dataclass(frozen=True, kw_only=True)
class MlaSm90Fp8KvSpec(_Fp8Spec):
    """Everything that determines the cubin of a kernel over an FP8 KV cache, with PV in fp16."""

    family: ClassVar[str] = "mla_sm90_fp8kv"
    common_parameters: ClassVar[tuple[Parameter, ...]] = parameters(
        """
        const unsigned char*: query query_rope cache rope_cache
        const float*: query_scales kv_scales
        const int*: block_tables kv_indptr seq_lens cu_seqlens_q sparse_cu_seqlens_q topk_length
        const float*: bmm1_scale_tensor bmm2_scale_tensor sinks
        u16*: out
        float*: lse
        unsigned char*: partial_out partial_states
        u32*: semaphores
        i64: query_stride query_head_stride query_rope_stride query_rope_head_stride page_stride
            token_stride rope_page_stride rope_token_stride scale_page_stride scale_token_stride
            total_rows
        int: num_seqs heads q_len max_pages block_tables_stride num_pages sparse_num_seqs
            sparse_q_len topk num_cta_groups cta_group_size is_causal bmm2_scales_scores
            schedule_id
        float: bmm1_scale bmm2_scale latent_scale rope_scale lse_factor
        """
    )

    @classmethod
    def covers(cls, arch: Arch, variant: MlaVariant) -> bool:
        """Whether ``arch`` has kernels of this family for a variant."""
        dtypes = variant.query_dtype, variant.kv_dtype
        extra = variant.kv_dtype.extra_row
        if extra is not None:
            is_of_one_row = variant.kv_dtype.row == extra and variant.head_dims in extra.head_dims
            is_bf16 = variant.query_dtype is DType.BF16
            return is_bf16 and is_of_one_row and _has_kernels(arch, variant, TWO_POOLS)
        return dtypes in _FP8KV_DTYPES and _has_kernels(arch, variant, PLAIN, SPARSE, DCP)

    @property
    def math_dtype(self) -> DType:
        """Element type of the unquantized data: bf16 rope elements, and the output."""
        return DType.BF16

    @property
    def p_dtype(self) -> DType:
        """Element type of P and of the converted V in the PV GEMM."""
        return DType.FP16

    def max_small_blocks(self, rows: int, kv_blocks: int) -> int:
        """Return up to how many KV blocks sm80 runs calls faster on 132 SMs, or -1."""
        if rows > 128:
            return -1
        if self.has_two_pools:
            if kv_blocks > 2:
                return MAX_SMALL_KV_BLOCKS
            # Of a window alone this kernel is as short, and has no splits to combine.
            return 32 if rows <= SMALL_TILE_ROWS else -1
        if self.variant.query_dtype.is_16bit:
            return 128
        return 64 if rows <= SMALL_TILE_ROWS else -1

    @property
    def calls_combine(self) -> bool:
        """Whether the combine of fixed splits is a call: not beside an unsplit query.

        With a call the compiler serializes the wgmma of its large tile (C7512).
        """
        return self.variant.query_dtype.is_16bit or self.swap_ab

    @property
    def has_ue8m0_scales(self) -> bool:
        """Whether a scale is a power of two, in a byte."""
        return self.row is not None and self.row.scale_code == "ue8m0"

    @property
    def dequantizes_k(self) -> bool:
        """Whether the QK GEMM takes K dequantized to fp16: by powers of two, and in large tiles.

        Sixteen scales of a token, one per 32 dims, would take too many registers.
        """
        has_few_scales = self.has_ue8m0_scales and self.scales <= 8
        return has_few_scales and self.block_m > 32

    @property
    def pv_has_softmax(self) -> bool:
        """Whether the PV warpgroups have the softmax: a QK GEMM that dequantizes K takes long."""
        return self.dequantizes_k

    @property
    def splits_query(self) -> bool:
        """Whether a bf16 query is split into two FP8 terms, high and low."""
        return self.variant.query_dtype.is_16bit and not self.dequantizes_k

    @property
    def uses_tma(self) -> bool:
        """False: producer warps gather the tokens by cp.async."""
        return False


def semaphore_region_bytes(sm_count: int) -> int:
    """Return the bytes of a region: semaphores, and the cached scheduler metadata of a schedule."""
    assert sm_count * 4 <= SEMAPHORE_BYTES
    return SCHED_META_OFFSET + sm_count * 2 * SCHED_META_BYTES


def block_m_for(rows: int) -> int:
    """Return the default BLOCK_M for ``rows`` query rows per sequence."""
    return min((tile for tile in BLOCK_MS if rows <= tile), default=BLOCK_MS[0])


def _has_kernels(arch: Arch, variant: MlaVariant, *modes: tuple[str, str, str]) -> bool:
    """Return whether ``arch`` has kernels for dims and one of the modes, of some element types."""
    return arch.has_wgmma and variant.head_dims in HEAD_DIMS and variant.mode in modes


def _supports_tma(arch: Arch, variant: MlaVariant) -> bool:
    """Return whether TMA loads KV tiles of the variant on ``arch``, for any element type."""
    box_tokens = math.gcd(variant.page_size, MlaSm90Spec.block_n)
    return _has_kernels(arch, variant, PLAIN, DCP) and box_tokens >= _MIN_BOX_TOKENS


# The families, the fastest first.
MLA_SM90 = (MlaSm90Spec, MlaSm90Fp8Spec, MlaSm90Fp8KvSpec)


def mla_sm90_kernels(arch: Arch, variant: MlaVariant, rows: int) -> list[MlaSm90Spec]:
    """Return the sm90 kernels for ``rows`` query rows per sequence, the fastest first."""
    found = [family.of(arch, variant, rows) for family in MLA_SM90]
    return [spec for spec in found if spec is not None]


def mla_sm90_kernel(
    arch: Arch, variant: MlaVariant, rows: int, p_dtype_choice: str
) -> MlaSm90Spec | None:
    """Return the sm90 kernel of a call, or None if unsupported.

    ``p_dtype_choice`` is the setting: ``fp16`` excludes the kernels that round P to FP8.
    """
    for spec in mla_sm90_kernels(arch, variant, rows):
        if p_dtype_choice == "auto" or spec.p_dtype.is_16bit:
            return spec
    return None
