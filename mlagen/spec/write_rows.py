"""Specs of the kernels that quantize tokens and write them into pages of an FP8 or FP4 cache."""

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

# Tensors, strides, and numbers; the prologue has more of the first and the last.
_TENSORS = parameters("const unsigned char*: scaled rest slot_mapping")
_PLACES = parameters(
    """
    unsigned char*: cache
    float*: scales
    i64: scaled_stride rest_stride page_stride token_stride scale_rows_offset
        scale_page_stride scale_token_stride
    int: num_tokens num_entries rows_per_page page_size has_wide_slots
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
    has_packed_rows: ClassVar[bool] = True
    has_mixed_rows: ClassVar[bool] = False
    rope_elements: ClassVar[int] = 64  # the last ones of a token

    dtype: DType  # of the tokens
    kv_dtype: DType
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
        """The parameters of every kernel, and those of the prologue."""
        if not self.has_prologue:
            return _TENSORS + _PLACES
        return _TENSORS + _PROLOGUE_TENSORS + _PLACES + _PROLOGUE_NUMBERS

    @property
    def row(self) -> RowFormat:
        """The format of the rows."""
        return POOLS[self.pool][self.kv_dtype]


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
