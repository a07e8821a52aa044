"""Base of the specs of MLA kernels: their variant, and the parameters that it adds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from mlagen.spec.dtype import DType
from mlagen.spec.kernel import CallShape, KernelSpec, Parameter, int32, int64, pointer
from mlagen.spec.mla.variant import E4M3_SCALES, MAX_HEADS, MlaVariant, output_dtype

# Of decode context parallel.
DCP_PARAMETERS = (
    pointer("causal_seqlens_kv_global", "const int"),
    int32("cp_world"),
    int32("cp_rank"),
)
# Of a kernel that gathers the tokens of top-k indices, and of one that loads pages by TMA.
GATHER_PARAMETERS = (
    pointer("rope_cache", "const unsigned char"),
    pointer("sparse_cu_seqlens_q", "const int"),
    pointer("topk_length", "const int"),
    int64("rope_page_stride"),
    int64("rope_token_stride"),
    int32("sparse_num_seqs"),
    int32("sparse_q_len"),
    int32("topk"),
)
_TMA_PARAMETERS = ("latent_map", "rope_map", "kv_map", "separate_rope")
_ORDER = ("128s", "Q", "q", "i", "f")  # of codes


def gather_parameters(common: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """Return the parameters of a kernel over top-k indices, from those over a block table."""
    kept = [one for one in common if one.name not in _TMA_PARAMETERS]
    return _in_order(kept + [one for one in GATHER_PARAMETERS if one not in kept])


def _in_order(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    return tuple(sorted(parameters, key=lambda one: _ORDER.index(one.code)))


@dataclass(frozen=True, kw_only=True)
class MlaKernelSpec(KernelSpec):
    """What the specs of MLA kernels have in common."""

    common_parameters: ClassVar[tuple[Parameter, ...]]  # of every variant

    variant: MlaVariant

    @property
    def out_dtype(self) -> DType:
        """Element type of the output: bf16 for an FP8 query."""
        return output_dtype(self.variant.query_dtype)

    @property
    def head_dim_qk(self) -> int:
        """Elements of a query row and of a cached token."""
        return self.variant.kv_lora_rank + self.variant.qk_rope_head_dim

    @property
    def head_dim_vo(self) -> int:
        """Elements of an output row: the latent part of a cached token."""
        return self.variant.kv_lora_rank

    @property
    def stored_bytes(self) -> int:
        """Bytes of a cached token."""
        return self.variant.kv_dtype.row_bytes(self.head_dim_qk)

    @property
    def has_packed_rows(self) -> bool:
        """Whether a cached token is a packed row, with its own :class:`RowFormat`."""
        return self.variant.kv_dtype.row is not None

    @property
    def has_packed_query(self) -> bool:
        """Whether a query row is packed, too."""
        return self.variant.query_dtype.row is not None

    @property
    def has_inline_scales(self) -> bool:
        """Whether a packed row has its scales, between latent and rope elements."""
        row = self.variant.kv_dtype.row
        return row is not None and row.has_inline_scales

    @property
    def scales_rope(self) -> bool:
        """Whether the scale of a token multiplies its bf16 rope elements."""
        row = self.variant.kv_dtype.row
        return row is not None and row.scales_rope

    @property
    def scales(self) -> int:
        """fp32 scales of a token, in its row or in a tensor of their own; 0 if it has none."""
        row = self.variant.kv_dtype.row
        if row is not None:
            return row.scales
        is_dequantized = self.variant.kv_dtype is DType.E4M3 and self.variant.query_dtype.is_16bit
        return E4M3_SCALES if is_dequantized else 0

    @property
    def is_sparse(self) -> bool:
        """Whether every query token has top-k indices."""
        return self.variant.lookup == "sparse"

    @property
    def has_dcp(self) -> bool:
        """Whether the KV cache has the tokens of one rank of decode context parallel."""
        return self.variant.mask == "dcp"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters of every variant, and those of this one."""
        if not self.has_dcp:
            return self.common_parameters
        return _in_order((*self.common_parameters, *DCP_PARAMETERS))

    def serves(self, call: CallShape) -> bool:
        """Whether the call may use this tile of the variant."""
        rows = call.heads * (1 if self.is_sparse else call.q_len)
        return call.heads <= MAX_HEADS and self.serves_rows(rows)

    def serves_rows(self, rows: int) -> bool:
        """Whether calls with so many query rows per sequence may use this tile of the variant."""
        raise NotImplementedError
