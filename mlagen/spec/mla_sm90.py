"""MLA decode on Hopper: what its kernels are specialised for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import (
    CallShape,
    KernelSpec,
    Parameter,
    float32,
    int32,
    int64,
    pointer,
    tensor_map,
)
from mlagen.spec.mla_support import PLAIN, SUPPORTED, MlaVariant

SpecT = TypeVar("SpecT")

# Rows of a tile, from the widest to the narrowest; a call takes the narrowest that holds the rows
# of a request, or the widest.
BLOCK_MS = (64, 32, 16)

# What belongs to a workspace: counters, one for each SM; then, kept from launch to launch, whose it
# is, lengths of requests, and what each block begins with.
SEMAPHORE_BYTES = 1024
CACHED_SEQ_LENS = 510
SCHED_META_BYTES = 128
SCHED_META_OFFSET = SEMAPHORE_BYTES + (2 + CACHED_SEQ_LENS) * 4

_WIDEST_NARROW = 32
_BLOCK_N = 64
_MIN_BOX_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class MlaSm90Spec(KernelSpec):
    """What changes the machine code of a Hopper MLA decode kernel, and nothing else."""

    family: ClassVar[str] = "mla_sm90"
    symbol: ClassVar[str] = "mla_sm90"
    template: ClassVar[str] = "kernels/mla_sm90/kernel.cu.j2"
    parameters: ClassVar[tuple[Parameter, ...]] = (
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
        int32("scores_take_bmm2"),
        int32("schedule_id"),
        float32("bmm1_scale"),
        float32("bmm2_scale"),
        float32("lse_factor"),
    )

    # Tiles that calls take whose requests have more rows, if there is little to do: so many rows,
    # if all of them have no more blocks of tokens than so many for each SM.
    smaller_tiles: ClassVar[tuple[tuple[int, int], ...]] = ((16, 2),)

    variant: MlaVariant
    block_m: int

    @property
    def small_calls(self) -> tuple[tuple[int, int], ...]:
        """Up to so many rows of a request, the blocks of tokens that the sm80 kernel is for.

        It is faster with no more of them in all requests, counted for each tile of 16 rows. See
        ``docs/measurements.md``.
        """
        return (16, 256), (32, 128)

    @property
    def swap_ab(self) -> bool:
        """Whether tokens take the place of rows in the products."""
        return self.block_m <= _WIDEST_NARROW

    @property
    def head_dim_qk(self) -> int:
        """Elements of a query row and of a cached token."""
        return self.variant.kv_lora_rank + self.variant.qk_rope_head_dim

    @property
    def head_dim_vo(self) -> int:
        """Elements of an output row, the first of a cached token."""
        return self.variant.kv_lora_rank

    @property
    def math_dtype(self) -> DType:
        """Element type that the tensor cores multiply."""
        return self.variant.query_dtype

    @property
    def p_dtype(self) -> DType:
        """Element type that p_dtype_choice are rounded to."""
        return self.math_dtype

    @property
    def is_sparse(self) -> bool:
        """Whether every query token has a list of tokens of its own."""
        return self.variant.lookup == "sparse"

    @property
    def producer_warps(self) -> int:
        """Warps that do everything else."""
        return 4

    @property
    def consumer_registers(self) -> int:
        """Registers of a thread that multiplies, with a wide tile."""
        return 224

    @property
    def producer_registers(self) -> int:
        """Registers of any other thread then."""
        return 3 * 168 - 2 * self.consumer_registers

    @property
    def box_tokens(self) -> int:
        """Tokens that one copy brings: of one page."""
        return math.gcd(self.variant.page_size, _BLOCK_N)

    @property
    def consumer_warps(self) -> int:
        """Warps that multiply."""
        return 4 if self.swap_ab else 8

    @property
    def copies_tile_groups(self) -> bool:
        """Whether a copy brings a third of a block's tiles, the rope part with the last."""
        return self.swap_ab

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return (self.consumer_warps + self.producer_warps) * 32

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one block: all there is."""
        return self.arch.shared_bytes

    @property
    def semaphore_bytes(self) -> int:
        """Bytes of the counters of a workspace, behind which lies what blocks begin with."""
        return SEMAPHORE_BYTES

    @property
    def cached_seq_lens(self) -> int:
        """Lengths of requests that there is room for."""
        return CACHED_SEQ_LENS

    @property
    def sched_meta_bytes(self) -> int:
        """Bytes of what one block begins with."""
        return SCHED_META_BYTES

    @property
    def is_cooperative(self) -> bool:
        """Whether blocks wait for each other: for the pieces of a request that they share."""
        return True

    def serves(self, call: CallShape) -> bool:
        """Whether such a call may take this kernel, of those that differ in the tile only."""
        return self.block_m in self.tiles_of(call.heads * call.q_len)

    def tiles_of(self, rows: int) -> tuple[int, ...]:
        """Return the rows of the tiles that requests of ``rows`` rows may take."""
        usual = block_m_for(rows)
        return (*(tile for tile, _ in self.smaller_tiles if tile < usual), usual)


@dataclass(frozen=True, kw_only=True)
class MlaSm90Fp8Base(MlaSm90Spec):
    """What the families over rows of 8 bits have in common: warps of their own for scores."""

    smaller_tiles: ClassVar[tuple[tuple[int, int], ...]] = ((16, 3), (32, 6))

    @property
    def consumer_warps(self) -> int:
        """Warps that multiply values."""
        return 8

    @property
    def producer_warps(self) -> int:
        """Warps that do everything else: four that load, and four that score."""
        return 8


def bytes_beside_workspace(sm_count: int) -> int:
    """Return the bytes that belong to a workspace besides it, on a GPU of so many SMs."""
    assert sm_count * 4 <= SEMAPHORE_BYTES
    return SCHED_META_OFFSET + sm_count * SCHED_META_BYTES


def block_m_for(rows: int) -> int:
    """Return the rows of a tile for requests of ``rows`` rows."""
    return min((tile for tile in BLOCK_MS if rows <= tile), default=BLOCK_MS[0])


def copies_pages(arch: Arch, variant: MlaVariant) -> bool:
    """Return whether ``arch`` copies tiles out of such pages, whatever their elements are."""
    return (
        arch.has_wgmma
        and (variant.kv_lora_rank, variant.qk_rope_head_dim) == (512, 64)
        and (variant.lookup, variant.values, variant.mask) == PLAIN
        and math.gcd(variant.page_size, _BLOCK_N) >= _MIN_BOX_TOKENS
    )


def mla_sm90_spec(arch: Arch, variant: MlaVariant, rows: int) -> MlaSm90Spec | None:
    """Return the sm90 kernel for requests of ``rows`` rows; None where there is none."""
    is_alike = variant.query_dtype.is_16bit and variant.kv_dtype is variant.query_dtype
    if not (is_alike and copies_pages(arch, variant)):
        return None
    return MlaSm90Spec(arch=arch, variant=variant, block_m=block_m_for(rows))


def mla_sm90_specs(arch: Arch) -> Iterator[MlaSm90Spec]:
    """Yield every sm90 kernel that ``arch`` may be asked for, each once."""
    return specs_found(arch, mla_sm90_spec)


def specs_found(
    arch: Arch, find: Callable[[Arch, MlaVariant, int], SpecT | None]
) -> Iterator[SpecT]:
    """Yield what ``find`` returns for every supported variant and tile, where it returns any."""
    for row in SUPPORTED:
        for variant in row.variants():
            for rows in BLOCK_MS:
                spec = find(arch, variant, rows)
                if spec is not None:
                    yield spec
