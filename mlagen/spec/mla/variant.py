"""Variants of the MLA decode kernels: the support table, and the base of their specs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from mlagen.errors import UnsupportedError
from mlagen.spec.dtype import EXTRA_ROW_FORMATS, ROW_FORMATS, DType
from mlagen.spec.kernel import (
    DCP_PARAMETERS,
    CallShape,
    KernelSpec,
    Parameter,
    Variant,
    parameters,
)
from mlagen.spec.rows import RowFormat


@dataclass(frozen=True, kw_only=True)
class MlaVariant(Variant):
    """Kernel properties that an MLA decode call determines; the tile is selected separately.

    ``lookup`` is ``paged`` (a block table of pages), ``sparse`` (top-k indices per query token) or
    ``two_pools`` (top-k indices into each of two pools, of any page size); ``values`` is ``shared``
    (V is the latent part of K) or ``separate``; ``mask`` is ``causal`` (a prefix of the tokens, or
    all), ``dcp`` (causal by global positions, in decode context parallel) or ``bias`` (added to the
    scores; minus infinity masks). With ``batch_invariant`` the bits of a result do not depend on
    the rest of the batch.
    """

    query_dtype: DType
    kv_dtype: DType
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    page_size: int = 64  # tokens; 0 with two pools: page sizes are arguments of the kernel
    lookup: str = "paged"
    values: str = "shared"
    mask: str = "causal"
    batch_invariant: bool = False

    @property
    def head_dims(self) -> tuple[int, int]:
        """``kv_lora_rank`` and ``qk_rope_head_dim``."""
        return self.kv_lora_rank, self.qk_rope_head_dim

    @property
    def has_small_tiles(self) -> bool:
        """Whether a small call divides the query rows among more sm80 tiles: its lists are short.

        Not a batch-invariant call, whose tile does not depend on the batch.
        """
        return self.lookup == "two_pools" and not self.batch_invariant

    @property
    def mode(self) -> tuple[str, str, str]:
        """``lookup``, ``values`` and ``mask``."""
        return self.lookup, self.values, self.mask


MAX_HEADS = 256  # query heads of a call

# Scales of a token in an e4m3 cache that a 16-bit query attends to, one per 128 latent elements; a
# shorter latent part does not use the last ones.
E4M3_SCALES = 4

# Page sizes that prewarming compiles; others are compiled on first use.
PAGE_SIZES = (1, 8, 16, 32, 64, 128)

PLAIN = ("paged", "shared", "causal")
SPARSE = ("sparse", "shared", "causal")
DCP = ("paged", "shared", "dcp")
TWO_POOLS = ("two_pools", "shared", "causal")
SEPARATE = ("paged", "separate", "causal")
BIAS = ("paged", "shared", "bias")


@dataclass(frozen=True, kw_only=True)
class MlaSupport:
    """One row of :data:`SUPPORTED`; every combination of its values has a kernel."""

    query_dtype: DType
    kv_dtype: DType
    head_dims: tuple[tuple[int, int], ...]  # kv_lora_rank, qk_rope_head_dim
    modes: tuple[tuple[str, str, str], ...]  # lookup, values, mask

    def covers(self, variant: MlaVariant) -> bool:
        """Whether the row includes the variant."""
        return (
            (variant.query_dtype, variant.kv_dtype) == (self.query_dtype, self.kv_dtype)
            and variant.head_dims in self.head_dims
            and variant.mode in self.modes
        )

    def variants(self) -> Iterator[MlaVariant]:
        """Yield the variants of the row, for the prewarmed page sizes."""
        for (rank, rope), mode in product(self.head_dims, self.modes):
            lookup, values, mask = mode
            for page_size in (0,) if mode == TWO_POOLS else PAGE_SIZES:
                yield MlaVariant(
                    query_dtype=self.query_dtype,
                    kv_dtype=self.kv_dtype,
                    kv_lora_rank=rank,
                    qk_rope_head_dim=rope,
                    page_size=page_size,
                    lookup=lookup,
                    values=values,
                    mask=mask,
                )


_ALL_DIMS = ((512, 64), (256, 64), (512, 0))
_16BIT_DTYPES = (DType.BF16, DType.FP16)
_OF_ONE_DTYPE = (PLAIN, SPARSE, SEPARATE, BIAS, DCP)
SUPPORTED = (
    *(
        MlaSupport(query_dtype=query, kv_dtype=kv, head_dims=_ALL_DIMS, modes=modes)
        for query, kv, modes in (
            *((dtype, dtype, _OF_ONE_DTYPE) for dtype in (*_16BIT_DTYPES, DType.E4M3)),
            *((dtype, DType.E4M3, (PLAIN, SPARSE, SEPARATE, DCP)) for dtype in _16BIT_DTYPES),
        )
    ),
    *(
        MlaSupport(
            query_dtype=query,
            kv_dtype=dtype,
            head_dims=row.head_dims,
            modes=(PLAIN, BIAS) if row.holds_queries else (PLAIN, SPARSE, DCP),
        )
        for dtype, row in ROW_FORMATS.items()
        for query in ((dtype,) if row.holds_queries else (*_16BIT_DTYPES, DType.E4M3))
        if dtype not in EXTRA_ROW_FORMATS
    ),
    *(
        MlaSupport(
            query_dtype=DType.BF16, kv_dtype=dtype, head_dims=row.head_dims, modes=(TWO_POOLS,)
        )
        for dtype, row in EXTRA_ROW_FORMATS.items()
    ),
)


def mla_variants() -> Iterator[MlaVariant]:
    """Yield every variant that prewarming covers."""
    for row in SUPPORTED:
        yield from row.variants()


def output_dtype(query_dtype: DType) -> DType:
    """Return the output type for a query type: bf16 for an FP8 query."""
    return query_dtype if query_dtype.is_16bit else DType.BF16


def require_supported(variant: MlaVariant) -> None:
    """Reject a variant that no row of :data:`SUPPORTED` covers.

    Raises UnsupportedError, whose message lists the supported values.
    """
    if any(row.covers(variant) for row in SUPPORTED):
        return
    of_pair = [
        row
        for row in SUPPORTED
        if (row.query_dtype, row.kv_dtype) == (variant.query_dtype, variant.kv_dtype)
    ]
    of_lookup = [row for row in SUPPORTED if variant.lookup in {mode[0] for mode in row.modes}]
    message = f"no MLA decode kernel for query {variant.query_dtype}, cache {variant.kv_dtype}"
    if of_pair:
        dims = " or ".join(f"({rank}, {rope})" for row in of_pair for rank, rope in row.head_dims)
        modes = " or ".join(f"({', '.join(mode)})" for row in of_pair for mode in row.modes)
        message += (
            f", (kv_lora_rank, qk_rope_head_dim) {variant.head_dims}, "
            f"(lookup, values, mask) ({', '.join(variant.mode)}); "
            f"supported there: {dims} with {modes}"
        )
    if not any(row in of_lookup for row in of_pair):
        pairs = "; ".join(f"query {row.query_dtype}, cache {row.kv_dtype}" for row in of_lookup)
        message += f"; supported with lookup {variant.lookup}: {pairs}"
    raise UnsupportedError(message)


# Of a kernel that gathers the tokens of top-k indices.
GATHER_PARAMETERS = parameters(
    """
    const unsigned char*: rope_cache
    const int*: sparse_cu_seqlens_q topk_length
    i64: rope_page_stride rope_token_stride
    int: sparse_num_seqs sparse_q_len topk
    """
)
# Of a kernel that gathers the tokens of top-k indices into two pools of any page sizes.
POOL_PARAMETERS = parameters(
    """
    const unsigned char*: extra_cache
    const int*: extra_indices extra_topk_length
    i64: extra_page_stride token_stride extra_token_stride
    int: extra_indices_stride extra_topk extra_num_pages page_size extra_page_size
        rows_per_page_shift extra_rows_per_page_shift
    u32: rows_per_page_mul extra_rows_per_page_mul rows_per_page extra_rows_per_page
    """
)


@dataclass(frozen=True, kw_only=True)
class MlaKernelSpec(KernelSpec):
    """What the specs of MLA kernels have in common."""

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
    def row(self) -> RowFormat | None:
        """The format of a packed row; of the first pool, if there are two."""
        return self.variant.kv_dtype.row

    @property
    def extra_row(self) -> RowFormat | None:
        """The format of a row of the second pool."""
        return self.variant.kv_dtype.extra_row

    @property
    def has_mixed_rows(self) -> bool:
        """Whether the rows of two pools differ."""
        return self.has_two_pools and self.row != self.extra_row

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
        return self.variant.lookup in ("sparse", "two_pools")

    @property
    def has_two_pools(self) -> bool:
        """Whether every query token has top-k indices into each of two pools."""
        return self.variant.lookup == "two_pools"

    @property
    def has_dcp(self) -> bool:
        """Whether the KV cache has the tokens of one rank of decode context parallel."""
        return self.variant.mask == "dcp"

    @property
    def added_parameters(self) -> tuple[Parameter, ...]:
        """Parameters of this kernel besides the common ones."""
        added = DCP_PARAMETERS if self.has_dcp else ()
        return (*added, *POOL_PARAMETERS) if self.has_two_pools else added

    def serves(self, call: CallShape) -> bool:
        """Whether the call may use this tile of the variant."""
        rows = call.heads * (1 if self.is_sparse else call.q_len)
        return call.heads <= MAX_HEADS and self.serves_rows(rows)

    def serves_rows(self, rows: int) -> bool:
        """Whether calls with so many query rows per sequence may use this tile of the variant."""
        raise NotImplementedError
