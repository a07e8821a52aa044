"""Which MLA decode calls are supported: the one table that checks, prewarm and docs read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from mlagen.errors import UnsupportedError
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import Variant


@dataclass(frozen=True, kw_only=True)
class MlaVariant(Variant):
    """What an MLA decode call determines of its kernel; the tile is chosen for it.

    ``lookup`` is ``paged`` (a block table leads to pages) or ``sparse`` (a list of tokens for every
    query token); ``values`` is ``shared`` (the first elements of a key are its value) or
    ``separate``; ``mask`` is ``causal`` (a prefix of the tokens, or all) or ``bias`` (a number is
    added to every score; minus infinity hides).
    """

    query_dtype: DType
    kv_dtype: DType
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    page_size: int = 64  # tokens
    lookup: str = "paged"
    values: str = "shared"
    mask: str = "causal"


# Page sizes that prewarming compiles for; any other is compiled when it is asked for.
PAGE_SIZES = (1, 8, 16, 32, 64, 128)

PLAIN = ("paged", "shared", "causal")
SPARSE = ("sparse", "shared", "causal")
SEPARATE = ("paged", "separate", "causal")
BIAS = ("paged", "shared", "bias")


@dataclass(frozen=True, kw_only=True)
class MlaSupport:
    """One row of :data:`SUPPORTED`: every combination of what it lists has a kernel."""

    query_dtype: DType
    kv_dtype: DType
    head_dims: tuple[tuple[int, int], ...]  # kv_lora_rank, qk_rope_head_dim
    forms: tuple[tuple[str, str, str], ...]  # lookup, values, mask

    def covers(self, variant: MlaVariant) -> bool:
        """Whether the variant is of this row."""
        return (
            (variant.query_dtype, variant.kv_dtype) == (self.query_dtype, self.kv_dtype)
            and (variant.kv_lora_rank, variant.qk_rope_head_dim) in self.head_dims
            and (variant.lookup, variant.values, variant.mask) in self.forms
        )

    def variants(self) -> Iterator[MlaVariant]:
        """Yield the variants of the row, for the usual page sizes."""
        for (rank, rope), form, page_size in product(self.head_dims, self.forms, PAGE_SIZES):
            lookup, values, mask = form
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
_ROPE_DIMS = ((512, 64), (256, 64))
_PACKED_DIMS = ((512, 64),)
_HALVES = (DType.BF16, DType.FP16)
SUPPORTED = (
    *(
        MlaSupport(
            query_dtype=dtype,
            kv_dtype=dtype,
            head_dims=_ALL_DIMS,
            forms=(PLAIN, SPARSE, SEPARATE, BIAS),
        )
        for dtype in _HALVES
    ),
    MlaSupport(
        query_dtype=DType.E4M3,
        kv_dtype=DType.E4M3,
        head_dims=_ROPE_DIMS,
        forms=(PLAIN, SPARSE, SEPARATE, BIAS),
    ),
    *(
        MlaSupport(
            query_dtype=dtype,
            kv_dtype=DType.E4M3,
            head_dims=_ALL_DIMS,
            forms=(PLAIN, SPARSE, SEPARATE),
        )
        for dtype in _HALVES
    ),
    *(
        MlaSupport(
            query_dtype=dtype,
            kv_dtype=DType.FP8_DS_MLA,
            head_dims=_PACKED_DIMS,
            forms=(PLAIN, SPARSE),
        )
        for dtype in _HALVES
    ),
    MlaSupport(
        query_dtype=DType.FP8_PER_TOKEN,
        kv_dtype=DType.FP8_PER_TOKEN,
        head_dims=_PACKED_DIMS,
        forms=(PLAIN, BIAS),
    ),
)


def output_dtype(query_dtype: DType) -> DType:
    """Return what MLA decode writes for a query: bf16 for what is not 16 bits wide."""
    return query_dtype if query_dtype.is_16bit else DType.BF16


def require_supported(variant: MlaVariant) -> None:
    """Reject what no row of :data:`SUPPORTED` covers.

    Raises
    ------
    UnsupportedError
        With what is covered in the message.
    """
    for row in SUPPORTED:
        if row.covers(variant):
            return
    rows = [
        row
        for row in SUPPORTED
        if (row.query_dtype, row.kv_dtype) == (variant.query_dtype, variant.kv_dtype)
    ]
    if not rows:
        pairs = "; ".join(f"query {row.query_dtype}, cache {row.kv_dtype}" for row in SUPPORTED)
        raise UnsupportedError(
            f"no MLA decode kernel for query {variant.query_dtype}, cache {variant.kv_dtype}; "
            f"supported: {pairs}"
        )
    dims = " or ".join(f"({rank}, {rope})" for row in rows for rank, rope in row.head_dims)
    forms = " or ".join(f"({', '.join(form)})" for row in rows for form in row.forms)
    raise UnsupportedError(
        f"no MLA decode kernel for query {variant.query_dtype}, cache {variant.kv_dtype}, "
        f"(kv_lora_rank, qk_rope_head_dim) ({variant.kv_lora_rank}, {variant.qk_rope_head_dim}), "
        f"(lookup, values, mask) ({variant.lookup}, {variant.values}, {variant.mask}); "
        f"supported there: {dims} with {forms}"
    )
