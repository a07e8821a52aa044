"""Specs of the kernels that write tokens into pages, and normalize and quantize them before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import ClassVar

from mlagen.spec.arch import Arch
from mlagen.spec.dtype import EXTRA_ROW_FORMATS, ROW_FORMATS, DType
from mlagen.spec.kernel import KernelSpec, Parameter, parameters
from mlagen.spec.rows import RowFormat

POOLS = {"first": ROW_FORMATS, "extra": EXTRA_ROW_FORMATS}
PROLOGUES = ("none", "norm_rope")
_TOKEN_DTYPES = (DType.BF16, DType.FP16)

# Dims of a token whose elements are not quantized, and those of its latent part.
_LATENT_DIMS = {576: 512, 512: 512, 320: 256}

# Tensors, strides, and numbers; the prologue has more of the first and the last.
_TOKENS = parameters("const unsigned char*: scaled rest")
_SLOTS = parameters("const unsigned char*: slot_mapping")
_PAGES = parameters(
    """
    const int*: batch_indices kv_indices kv_indptr
    const unsigned char*: positions
    """
)
_PACKED_PLACES = parameters(
    """
    unsigned char*: cache
    float*: scales
    i64: scaled_stride rest_stride page_stride token_stride scale_rows_offset
        scale_page_stride scale_token_stride
    int: num_tokens num_entries rows_per_page page_size has_wide_slots
    """
)
_PLAIN_PLACES = parameters(
    """
    unsigned char*: cache rest_cache
    i64: scaled_stride rest_stride page_stride token_stride rest_page_stride rest_token_stride
    int: num_tokens num_entries rows_per_page page_size num_seqs num_indices
    """
)
_PROLOGUE_TENSORS = parameters(
    """
    const unsigned char*: norm_weight positions
    const float*: cos_sin_cache
    """
)
_PROLOGUE_NUMBERS = parameters(
    """
    int: num_positions has_wide_positions
    const float: norm_eps
    """
)


@dataclass(frozen=True, kw_only=True)
class WriteRowsSpec(KernelSpec):
    """Everything that determines the cubin of a kernel that writes rows."""

    family: ClassVar[str] = "write_rows"
    threads: ClassVar[int] = 256  # per CTA; a warp takes a token
    shared_bytes: ClassVar[int] = 0  # all of it is static
    has_mixed_rows: ClassVar[bool] = False
    rope_elements: ClassVar[int] = 64  # the last ones of a token

    dtype: DType  # of the tokens
    kv_dtype: DType  # that of the tokens: elements are stored as they are, latents and rope apart
    pool: str  # "first", or "extra" for the rows of the second pool
    head_dim_qk: int  # elements of a token
    # "none", or "norm_rope": RMSNorm and rope of the tokens, each if a call has its tensors.
    prologue: str = PROLOGUES[0]

    @property
    def has_prologue(self) -> bool:
        """Whether the kernel may normalize and rotate tokens before it quantizes them."""
        return self.prologue != PROLOGUES[0]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters of the tokens, of their places, and of the prologue."""
        found = (_SLOTS, _PACKED_PLACES) if self.has_packed_rows else (_PAGES, _PLAIN_PLACES)
        if not self.has_prologue:
            return (*_TOKENS, *found[0], *found[1])
        tensors = dict.fromkeys((*found[0], *_PROLOGUE_TENSORS))
        return (*_TOKENS, *tensors, *found[1], *_PROLOGUE_NUMBERS)

    @property
    def has_packed_rows(self) -> bool:
        """Whether tokens are quantized."""
        return self.row is not None

    @property
    def row(self) -> RowFormat | None:
        """The format of the rows; None if tokens are not quantized."""
        return POOLS[self.pool].get(self.kv_dtype)

    @property
    def scaled_elements(self) -> int:
        """The elements of a token that are quantized; if none are, those of its latent part."""
        return self.norm_elements if self.row is None else self.row.scaled_elements

    @property
    def norm_elements(self) -> int:
        """The first elements of a token, which RMSNorm normalizes."""
        return _LATENT_DIMS[self.head_dim_qk] if self.row is None else self.row.value_elements


@lru_cache
def write_plain_spec(
    arch: Arch, dtype: DType, latent_dim: int, rope_dim: int, *, has_prologue: bool = False
) -> WriteRowsSpec | None:
    """Return the kernel for tokens that are not quantized, or None if unsupported."""
    dims = latent_dim + rope_dim
    if dtype not in _TOKEN_DTYPES or _LATENT_DIMS.get(dims) != latent_dim:
        return None
    prologue = PROLOGUES[has_prologue]
    return WriteRowsSpec(
        arch=arch, dtype=dtype, kv_dtype=dtype, pool="first", head_dim_qk=dims, prologue=prologue
    )


@lru_cache  # one dict lookup for each write
def write_rows_spec(
    arch: Arch, dtype: DType, row: RowFormat, elements: int, *, has_prologue: bool = False
) -> WriteRowsSpec | None:
    """Return the kernel for tokens of a dtype, or None if unsupported: a row without a name."""
    if dtype not in _TOKEN_DTYPES or not row.has(elements):
        return None
    for pool, formats in POOLS.items():
        for kv_dtype, known in formats.items():
            if known == row:
                return WriteRowsSpec(
                    arch=arch,
                    dtype=dtype,
                    kv_dtype=kv_dtype,
                    pool=pool,
                    head_dim_qk=elements,
                    prologue=PROLOGUES[has_prologue],
                )
    return None


def write_rows_specs_of(
    arch: Arch, dtype: DType, kv_dtype: DType, elements: int
) -> Iterator[WriteRowsSpec]:
    """Yield the kernels that write tokens of a dtype into the pools of a cache: two if rows differ.

    None for a cache without a row format.
    """
    found = (formats.get(kv_dtype) for formats in POOLS.values())
    for row in dict.fromkeys(row for row in found if row is not None):
        spec = write_rows_spec(arch, dtype, row, elements)
        if spec is not None:
            yield spec


def write_rows_specs(arch: Arch) -> Iterator[WriteRowsSpec]:
    """Yield every kernel of this family that prewarming covers for ``arch``, each once."""
    rows = dict.fromkeys(row for formats in POOLS.values() for row in formats.values())
    widths = [(row, row.scaled_elements + rest) for row in rows for rest in row.bf16_elements]
    for (row, elements), dtype, prologue in product(widths, _TOKEN_DTYPES, (False, True)):
        spec = write_rows_spec(arch, dtype, row, elements, has_prologue=prologue)
        if spec is not None:
            yield spec
    dims = ((latent, total - latent) for total, latent in _LATENT_DIMS.items())
    for (latent, rope), dtype, prologue in product(dims, _TOKEN_DTYPES, (False, True)):
        spec = write_plain_spec(arch, dtype, latent, rope, has_prologue=prologue)
        if spec is not None:
            yield spec
