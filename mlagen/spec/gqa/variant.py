"""Variants of the GQA decode kernels: the support table, and the parameters that they share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from mlagen.errors import UnsupportedError
from mlagen.spec.dtype import TOKEN_HEAD_ELEMENTS, DType
from mlagen.spec.kernel import (
    DCP_PARAMETERS,
    KernelSpec,
    Parameter,
    Variant,
    parameters,
)


@dataclass(frozen=True, kw_only=True)
class GqaVariant(Variant):
    """Kernel properties that a GQA decode call determines; the tile is selected separately."""

    query_dtype: DType
    kv_dtype: DType
    out_dtype: DType
    head_dim: int = 128
    head_dim_vo: int = 0  # of values and outputs; 0 where it is that of keys
    page_size: int = 64  # tokens
    has_soft_cap: bool = False
    has_dcp: bool = False  # the cache has the tokens of one rank of decode context parallel
    separate_page_ids: bool = False  # keys and values have block tables of their own
    batch_invariant: bool = False  # the bits of a result do not depend on the rest of the batch
    sparse_block: int = 0  # tokens of a KV block that an index of a sparse call names; 0: dense
    has_output_gate: bool = False
    has_head_tables: bool = False  # KV heads have block tables and lengths of their own

    def __post_init__(self) -> None:
        if self.head_dim_vo == self.head_dim:  # one kernel has one name
            object.__setattr__(self, "head_dim_vo", 0)

    @property
    def has_token_scales(self) -> bool:
        """Whether each token and KV head has a scale of its key, and one of its value."""
        return self.kv_dtype.has_token_scales


@dataclass(frozen=True, kw_only=True)
class GqaSupport:
    """One row of :data:`SUPPORTED`; every combination of its values has a kernel."""

    query_dtype: DType
    kv_dtype: DType
    out_dtypes: tuple[DType, ...]


# Of a cache besides the dtype of the query.
QUANTIZED_DTYPES = (DType.E4M3, DType.E5M2, DType.INT8, DType.NVFP4, *TOKEN_HEAD_ELEMENTS)
_16BIT_DTYPES = (DType.BF16, DType.FP16)
SUPPORTED = tuple(
    GqaSupport(
        query_dtype=query,
        kv_dtype=kv or query,
        out_dtypes=(query, DType.E4M3) if kv and kv.element is DType.E4M3 else (query,),
    )
    for query, kv in product(_16BIT_DTYPES, (None, *QUANTIZED_DTYPES))
)

# NVFP4 elements per e4m3 scale; a byte holds two elements.
NVFP4_BLOCK = 16

# Values that prewarming compiles. Other multiples of 16 up to 256, and other page sizes, are
# compiled on first use.
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
MAX_HEAD_DIM = 512
# Max output elements per CTA of the sm80 kernel, which slices a wider head over several CTAs.
SLICE_DIMS = 256

# What every GQA kernel takes besides its pointers, strides and plan: the launch reads the values
# from `GqaProblem`, by name.
PROBLEM_PARAMETERS = parameters(
    """
    int: num_seqs kv_heads group_size q_len mask_words window max_pages block_tables_stride
        num_pages is_causal bmm2_scales_scores
    const float: score_factor lse_factor
    """
)
# Of a kernel over a cache with scales: for each NVFP4_BLOCK elements, or for each token.
CACHE_SCALE_PARAMETERS = parameters(
    """
    const unsigned char*: key_scales value_scales
    i64: key_scale_page_stride key_scale_token_stride key_scale_head_stride value_scale_page_stride
        value_scale_token_stride value_scale_head_stride
    """
)
# Of a kernel whose scores have a soft cap.
SOFT_CAP_PARAMETERS = parameters("const float: soft_cap")
# Of a kernel whose keys and values have block tables of their own.
VALUE_TABLE_PARAMETERS = parameters("const int*: value_tables")
# Of a sparse kernel, to which every query token is a sequence of its own.
SPARSE_PARAMETERS = parameters(
    """
    const int*: block_indices token_to_req
    i64: indices_stride indices_head_stride
    int: num_indices has_index_counts num_requests request_q_len
    """
)
OUTPUT_GATE_PARAMETERS = parameters("const u16*: output_gate")
# The parameters that a flag of the variant adds.
ADDED_PARAMETERS = {
    "has_soft_cap": SOFT_CAP_PARAMETERS,
    "has_dcp": DCP_PARAMETERS,
    "separate_page_ids": VALUE_TABLE_PARAMETERS,
    "sparse_block": SPARSE_PARAMETERS,
    "has_output_gate": OUTPUT_GATE_PARAMETERS,
}
# Scales of one call: no part of its plan.
SCALE_PARAMETERS = parameters("float: bmm1_scale bmm2_scale output_factor")


def gqa_variants() -> Iterator[GqaVariant]:
    """Yield every variant that prewarming covers: none with scales of tokens."""
    rows = [row for row in SUPPORTED if not row.kv_dtype.has_token_scales]
    for row, head_dim, page_size in product(rows, HEAD_DIMS, PAGE_SIZES):
        for out_dtype in row.out_dtypes:
            yield GqaVariant(
                query_dtype=row.query_dtype,
                kv_dtype=row.kv_dtype,
                out_dtype=out_dtype,
                head_dim=head_dim,
                page_size=page_size,
            )


def has_dim(head_dim: int) -> bool:
    """Whether there are kernels of a head dimension."""
    return (head_dim % 16 == 0 and 16 <= head_dim <= SLICE_DIMS) or head_dim == MAX_HEAD_DIM


def require_supported(variant: GqaVariant) -> None:
    """Reject a variant that no row of :data:`SUPPORTED` covers.

    Raises UnsupportedError, whose message lists the supported values.
    """
    head_dim_vo = variant.head_dim_vo
    if head_dim_vo and not (has_dim(head_dim_vo) and head_dim_vo < variant.head_dim):
        raise UnsupportedError(
            f"no GQA decode kernel for values of {head_dim_vo} elements under head_dim "
            f"{variant.head_dim}; supported: as many, and multiples of 16 below, up to {SLICE_DIMS}"
        )
    if not has_dim(variant.head_dim):
        raise UnsupportedError(
            f"no GQA decode kernel for head_dim {variant.head_dim}; supported: multiples of 16 up "
            f"to {SLICE_DIMS}, and {MAX_HEAD_DIM}"
        )
    if variant.sparse_block and (variant.has_dcp or variant.has_token_scales):
        raise UnsupportedError(
            "no sparse GQA decode kernel for decode context parallel or scales of tokens"
        )
    if variant.has_output_gate and not variant.out_dtype.is_16bit:
        raise UnsupportedError(
            f"no GQA decode kernel with an output gate for output {variant.out_dtype}; supported: "
            "outputs of 16 bits"
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


@dataclass(frozen=True, kw_only=True)
class GqaSpec(KernelSpec):
    """Base spec of the GQA decode kernels."""

    variant: GqaVariant

    @property
    def added_parameters(self) -> tuple[Parameter, ...]:
        """Parameters of this variant besides the common ones."""
        flags = [flag for flag in ADDED_PARAMETERS if getattr(self.variant, flag)]
        return tuple(one for flag in flags for one in ADDED_PARAMETERS[flag])

    @property
    def out_dtype(self) -> DType:
        """Element type of the output."""
        return self.variant.out_dtype

    @property
    def head_dim_vo(self) -> int:
        """Elements of a value and of an output row."""
        return self.variant.head_dim_vo or self.variant.head_dim

    @property
    def dequants_kv(self) -> bool:
        """Whether the KV cache is converted to another type before the MMA."""
        return not self.variant.kv_dtype.is_16bit

    @property
    def stores_e4m3(self) -> bool:
        """Whether the output is e4m3."""
        return self.variant.out_dtype is DType.E4M3
