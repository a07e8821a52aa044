"""Spec of the sm90 MLA decode kernels in bf16 and fp16, and the base of all sm90 MLA specs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import (
    Parameter,
    float32,
    int32,
    int64,
    pointer,
    tensor_map,
)
from mlagen.spec.mla.kernel import MlaKernelSpec, gather_parameters
from mlagen.spec.mla.variant import DCP, PLAIN, SPARSE, SUPPORTED, MlaVariant

SpecT = TypeVar("SpecT")

# BLOCK_M of the tiles, largest first. A call uses the smallest tile that holds the rows of a
# sequence, or else the largest.
BLOCK_MS = (64, 32, 16)

# Device memory beside a workspace: one semaphore per SM; then the cached scheduler metadata, which
# is the schedule id, the sequence lengths and the initial work of each CTA.
SEMAPHORE_BYTES = 1024
CACHED_SEQ_LENS = 510
SCHED_META_BYTES = 128
SCHED_META_OFFSET = SEMAPHORE_BYTES + (2 + CACHED_SEQ_LENS) * 4

HEAD_DIMS = ((512, 64), (512, 0))  # kv_lora_rank, qk_rope_head_dim

_MAX_SWAP_AB_ROWS = 32
_TILE_ELEMENTS = 64  # of a row of 16-bit elements, 128 bytes
_MIN_BOX_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class MlaSm90Spec(MlaKernelSpec):
    """Everything that determines the cubin of an sm90 MLA decode kernel."""

    family: ClassVar[str] = "mla_sm90"
    symbol: ClassVar[str] = "mla_sm90"
    common_parameters: ClassVar[tuple[Parameter, ...]] = (
        tensor_map("latent_map"),
        tensor_map("rope_map"),
        tensor_map("kv_map"),
        pointer("query", "const unsigned char"),
        pointer("query_rope", "const unsigned char"),
        pointer("cache", "const unsigned char"),
        pointer("block_tables", "const int"),
        pointer("kv_indptr", "const int"),
        pointer("seq_lens", "const int"),
        pointer("cu_seqlens_q", "const int"),
        pointer("bmm1_scale_tensor", "const float"),
        pointer("bmm2_scale_tensor", "const float"),
        pointer("sinks", "const float"),
        pointer("out", "u16"),
        pointer("lse", "float"),
        pointer("partial_out", "unsigned char"),
        pointer("partial_states", "unsigned char"),
        pointer("semaphores", "u32"),
        int64("query_stride"),
        int64("query_head_stride"),
        int64("query_rope_stride"),
        int64("query_rope_head_stride"),
        int64("page_stride"),
        int64("token_stride"),
        int64("total_rows"),
        int32("num_seqs"),
        int32("heads"),
        int32("q_len"),
        int32("max_pages"),
        int32("block_tables_stride"),
        int32("num_pages"),
        int32("num_cta_groups"),
        int32("cta_group_size"),
        int32("separate_rope"),
        int32("is_causal"),
        int32("bmm2_scales_scores"),
        int32("schedule_id"),
        float32("bmm1_scale"),
        float32("bmm2_scale"),
        float32("lse_factor"),
    )

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

    block_m: int

    @property
    def small_calls(self) -> tuple[tuple[int, int], ...]:
        """(max rows per sequence, max KV blocks) of calls that sm80 runs faster on 132 SMs.

        KV blocks of all sequences count once per tile of 16 rows.
        """
        return ((16, 64),) if self.is_sparse else ((16, 256), (32, 128))

    @property
    def swap_ab(self) -> bool:
        """Whether the MMAs swap A and B: KV tokens are the M dimension."""
        return self.block_m <= _MAX_SWAP_AB_ROWS

    @property
    def folder(self) -> str:
        """Folder of one of the two kernels."""
        return f"kernels/mla_sm90/{'swap_ab' if self.swap_ab else 'seesaw'}"

    @property
    def fixed_overhead_blocks(self) -> int:
        """Prologue and epilogue of a work tile, in KV blocks."""
        return 2 if self.swap_ab else 6

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
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters of every variant; a kernel over top-k indices has no tensor maps."""
        if not self.is_sparse:
            return super().parameters
        return gather_parameters(self.common_parameters)

    @property
    def producer_warps(self) -> int:
        """Warps of the producer warpgroup."""
        return 4

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

    @property
    def semaphore_bytes(self) -> int:
        """Bytes of a workspace's semaphores; the cached scheduler metadata follows them."""
        return SEMAPHORE_BYTES

    @property
    def cached_seq_lens(self) -> int:
        """Max sequence lengths in the cached scheduler metadata."""
        return CACHED_SEQ_LENS

    @property
    def sched_meta_bytes(self) -> int:
        """Bytes of the cached scheduler metadata of one CTA."""
        return SCHED_META_BYTES

    @property
    def is_cooperative(self) -> bool:
        """True: a CTA waits for the splits of its work tile that other CTAs compute."""
        return True

    def serves_rows(self, rows: int) -> bool:
        """Whether calls with so many query rows per sequence may use this tile of the variant."""
        return self.block_m in self.tiles_of(rows)

    def tiles_of(self, rows: int) -> tuple[int, ...]:
        """Return the BLOCK_M of every tile for ``rows`` query rows per sequence."""
        default = block_m_for(rows)
        return (*(tile for tile, _ in self.smaller_tiles if tile < default), default)


def semaphore_region_bytes(sm_count: int) -> int:
    """Return the bytes of a workspace's semaphores and cached scheduler metadata."""
    assert sm_count * 4 <= SEMAPHORE_BYTES
    return SCHED_META_OFFSET + sm_count * SCHED_META_BYTES


def block_m_for(rows: int) -> int:
    """Return the default BLOCK_M for ``rows`` query rows per sequence."""
    return min((tile for tile in BLOCK_MS if rows <= tile), default=BLOCK_MS[0])


def has_sm90_kernels(arch: Arch, variant: MlaVariant, *modes: tuple[str, str, str]) -> bool:
    """Return whether ``arch`` has kernels for dims and one of the modes, of some element types."""
    return arch.has_wgmma and variant.head_dims in HEAD_DIMS and variant.mode in modes


def supports_tma(arch: Arch, variant: MlaVariant) -> bool:
    """Return whether TMA loads KV tiles of the variant on ``arch``, for any element type."""
    box_tokens = math.gcd(variant.page_size, MlaSm90Spec.block_n)
    return has_sm90_kernels(arch, variant, PLAIN, DCP) and box_tokens >= _MIN_BOX_TOKENS


def mla_sm90_spec(arch: Arch, variant: MlaVariant, rows: int) -> MlaSm90Spec | None:
    """Return the kernel for ``rows`` query rows per sequence, or None if unsupported."""
    is_16bit = variant.query_dtype.is_16bit and variant.kv_dtype is variant.query_dtype
    is_covered = supports_tma(arch, variant) or has_sm90_kernels(arch, variant, SPARSE)
    if not (is_16bit and is_covered):
        return None
    return MlaSm90Spec(arch=arch, variant=variant, block_m=block_m_for(rows))


def mla_sm90_specs(arch: Arch) -> Iterator[MlaSm90Spec]:
    """Yield every kernel of this family that ``arch`` supports, each once."""
    return supported_specs(arch, mla_sm90_spec)


def supported_specs(
    arch: Arch, make_spec: Callable[[Arch, MlaVariant, int], SpecT | None]
) -> Iterator[SpecT]:
    """Yield the spec of every supported variant and tile for which ``make_spec`` has one."""
    for row in SUPPORTED:
        for variant in row.variants():
            for rows in BLOCK_MS:
                spec = make_spec(arch, variant, rows)
                if spec is not None:
                    yield spec
