"""Spec of the sm90 MLA decode kernels over an FP8 KV cache, with the PV GEMM in fp16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import Parameter, float32, int32, int64, pointer
from mlagen.spec.mla.sm90 import block_m_for, has_sm90_kernels, supported_specs
from mlagen.spec.mla.sm90_fp8 import MlaSm90Fp8Base
from mlagen.spec.mla.variant import DCP, PLAIN, SPARSE, MlaVariant

# Query and KV cache. The kernel has four scales of a token, or one.
_DTYPES = (
    (DType.BF16, DType.E4M3),
    (DType.BF16, DType.FP8_DS_MLA),
    (DType.E4M3, DType.E4M3),
    (DType.E4M3, DType.FP8_DS_MLA),
    (DType.FP8_PER_TOKEN, DType.FP8_PER_TOKEN),
)


@dataclass(frozen=True, kw_only=True)
class MlaSm90Fp8KvSpec(MlaSm90Fp8Base):
    """Everything that determines the cubin of a kernel of this family."""

    family: ClassVar[str] = "mla_sm90_fp8kv"
    symbol: ClassVar[str] = "mla_sm90_fp8kv"
    common_parameters: ClassVar[tuple[Parameter, ...]] = (
        pointer("query", "const unsigned char"),
        pointer("query_rope", "const unsigned char"),
        pointer("cache", "const unsigned char"),
        pointer("rope_cache", "const unsigned char"),
        pointer("query_scales", "const float"),
        pointer("kv_scales", "const float"),
        pointer("block_tables", "const int"),
        pointer("kv_indptr", "const int"),
        pointer("seq_lens", "const int"),
        pointer("cu_seqlens_q", "const int"),
        pointer("sparse_cu_seqlens_q", "const int"),
        pointer("topk_length", "const int"),
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
        int64("rope_page_stride"),
        int64("rope_token_stride"),
        int64("scale_page_stride"),
        int64("scale_token_stride"),
        int64("total_rows"),
        int32("num_seqs"),
        int32("heads"),
        int32("q_len"),
        int32("max_pages"),
        int32("block_tables_stride"),
        int32("num_pages"),
        int32("sparse_num_seqs"),
        int32("sparse_q_len"),
        int32("topk"),
        int32("num_cta_groups"),
        int32("cta_group_size"),
        int32("is_causal"),
        int32("bmm2_scales_scores"),
        int32("schedule_id"),
        float32("bmm1_scale"),
        float32("bmm2_scale"),
        float32("latent_scale"),
        float32("rope_scale"),
        float32("lse_factor"),
    )

    @property
    def math_dtype(self) -> DType:
        """Element type of the unquantized data: bf16 rope elements, and the output."""
        return DType.BF16

    @property
    def p_dtype(self) -> DType:
        """Element type of P and of the converted V in the PV GEMM."""
        return DType.FP16

    @property
    def small_calls(self) -> tuple[tuple[int, int], ...]:
        """(max rows per sequence, max KV blocks) of calls that sm80 runs faster on 132 SMs."""
        return ((128, 128),) if self.splits_query else ((16, 64),)

    @property
    def splits_query(self) -> bool:
        """Whether a bf16 query is split into two FP8 terms, high and low."""
        return self.variant.query_dtype.is_16bit

    @property
    def uses_tma(self) -> bool:
        """False: producer warps gather the tokens by cp.async."""
        return False


def mla_sm90_fp8kv_spec(arch: Arch, variant: MlaVariant, rows: int) -> MlaSm90Fp8KvSpec | None:
    """Return the kernel for ``rows`` query rows per sequence, or None if unsupported.

    In a sparse call every query token is a sequence of its own.
    """
    has_dtypes = (variant.query_dtype, variant.kv_dtype) in _DTYPES
    if not (has_dtypes and has_sm90_kernels(arch, variant, PLAIN, SPARSE, DCP)):
        return None
    return MlaSm90Fp8KvSpec(arch=arch, variant=variant, block_m=block_m_for(rows))


def mla_sm90_fp8kv_specs(arch: Arch) -> Iterator[MlaSm90Fp8KvSpec]:
    """Yield every kernel of this family that ``arch`` supports, each once."""
    return supported_specs(arch, mla_sm90_fp8kv_spec)
