"""MLA decode on Hopper over rows of 8 bits, with values as fp16: what its kernels are made for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import CallShape, Parameter, float32, int32, int64, pointer
from mlagen.spec.mla_hopper import MlaHopper8BitSpec, specs_found, tile_rows_for
from mlagen.spec.mla_support import PLAIN, SPARSE, MlaVariant

# Of query and cache.
_DTYPES = (
    (DType.BF16, DType.E4M3),
    (DType.BF16, DType.PACKED656),
    (DType.E4M3, DType.E4M3),
    (DType.PACKED640, DType.PACKED640),
)


@dataclass(frozen=True, kw_only=True)
class MlaHopperPackedSpec(MlaHopper8BitSpec):
    """What changes the machine code of such a kernel, and nothing else."""

    family: ClassVar[str] = "mla_hopper_packed"
    symbol: ClassVar[str] = "mla_hopper_packed"
    template: ClassVar[str] = "kernels/mla_sm90_fp8kv/kernel.cu.j2"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        pointer("query", "const unsigned char"),
        pointer("query_rope", "const unsigned char"),
        pointer("cache", "const unsigned char"),
        pointer("rope_cache", "const unsigned char"),
        pointer("query_scales", "const float"),
        pointer("kv_scales", "const float"),
        pointer("block_tables", "const int"),
        pointer("table_starts", "const int"),
        pointer("seq_lens", "const int"),
        pointer("cum_seq_lens_q", "const int"),
        pointer("list_ends", "const int"),
        pointer("top_k_lens", "const int"),
        pointer("bmm1_scale_tensor", "const float"),
        pointer("bmm2_scale_tensor", "const float"),
        pointer("sinks", "const float"),
        pointer("out", "u16"),
        pointer("lse", "float"),
        pointer("partial_out", "unsigned char"),
        pointer("partial_rows", "unsigned char"),
        pointer("counters", "u32"),
        int64("query_stride"),
        int64("query_head_stride"),
        int64("query_rope_stride"),
        int64("query_rope_head_stride"),
        int64("page_stride"),
        int64("token_stride"),
        int64("rope_page_stride"),
        int64("rope_token_stride"),
        int64("scale_page_stride"),
        int64("scale_token_stride"),
        int64("total_rows"),
        int32("requests"),
        int32("heads"),
        int32("q_len"),
        int32("max_pages"),
        int32("block_tables_stride"),
        int32("num_pages"),
        int32("list_requests"),
        int32("list_q_len"),
        int32("top_k"),
        int32("teams"),
        int32("team_size"),
        int32("is_causal"),
        int32("scores_take_bmm2"),
        int32("plan"),
        float32("bmm1_scale"),
        float32("bmm2_scale"),
        float32("latent_scale"),
        float32("rope_scale"),
        float32("lse_factor"),
    )

    @property
    def math_dtype(self) -> DType:
        """Element type of what is not stored in 8 bits: ropes of packed rows, and the output."""
        return DType.BF16

    @property
    def probability_dtype(self) -> DType:
        """Element type that probabilities are rounded to, and values converted."""
        return DType.FP16

    @property
    def small_calls(self) -> tuple[tuple[int, int], ...]:
        """Up to so many rows of a request, the blocks of tokens that the portable kernel is for."""
        return ((128, 128),) if self.splits_query else ((16, 64),)

    @property
    def splits_query(self) -> bool:
        """Whether an element of the query is multiplied as the sum of two in 8 bits."""
        return self.variant.query_dtype.is_16bit

    @property
    def stored_bytes(self) -> int:
        """Bytes of a cached token."""
        return self.variant.kv_dtype.row_bytes(self.head_dim_qk)

    @property
    def loading_warps(self) -> int:
        """Warps that bring tokens into shared memory."""
        return 4

    def serves(self, call: CallShape) -> bool:
        """Whether such a call may take this kernel, of those that differ in the tile only."""
        q_len = 1 if self.is_sparse else call.q_len
        return self.tile_rows in self.tiles_of(call.heads * q_len)


def mla_hopper_packed_spec(
    arch: Arch, variant: MlaVariant, rows: int
) -> MlaHopperPackedSpec | None:
    """Return the Hopper kernel for requests of ``rows`` rows; None where there is none.

    Of a sparse call every query token is a request.
    """
    is_covered = (
        arch.has_wgmma
        and (variant.query_dtype, variant.kv_dtype) in _DTYPES
        and (variant.kv_lora_rank, variant.qk_rope_head_dim) == (512, 64)
        and (variant.lookup, variant.values, variant.mask) in (PLAIN, SPARSE)
    )
    if not is_covered:
        return None
    return MlaHopperPackedSpec(arch=arch, variant=variant, tile_rows=tile_rows_for(rows))


def mla_hopper_packed_specs(arch: Arch) -> Iterator[MlaHopperPackedSpec]:
    """Yield every such kernel that ``arch`` may be asked for, each once."""
    return specs_found(arch, mla_hopper_packed_spec)
