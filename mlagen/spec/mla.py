"""MLA decode: what its kernels are specialised for, and what is supported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, NamedTuple

from mlagen.errors import UnsupportedError
from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import KernelSpec, Parameter, float32, int32, int64, pointer


@dataclass(frozen=True, kw_only=True)
class MlaSupport:
    """One row of :data:`SUPPORTED`: every combination of what it lists has a kernel."""

    query_dtype: DType
    kv_dtype: DType
    kv_lora_rank: int
    qk_rope_head_dim: int
    page_sizes: tuple[int, ...]


PAGE_SIZES = (1, 8, 16, 32, 64, 128)
SUPPORTED = tuple(
    MlaSupport(
        query_dtype=dtype,
        kv_dtype=dtype,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=64,
        page_sizes=PAGE_SIZES,
    )
    for dtype, kv_lora_rank in product((DType.BF16, DType.FP16), (512, 256))
)


class MlaTile(NamedTuple):
    """How a block cuts its work; see docs/explanation/mla-decode-kernel.md for the choice."""

    tile_rows: int
    tile_tokens: int
    stages: int
    row_warps: int
    token_warps: int
    dim_warps: int
    blocks_per_sm: int


# From the widest tile to the narrowest. A request takes the narrowest one that holds its rows, or
# the widest that fits the architecture's shared memory.
TILES = (
    #    rows tokens stages row_warps token_warps dim_warps blocks_per_sm
    MlaTile(64, 64, 2, 2, 4, 2, 1),
    MlaTile(32, 64, 2, 2, 4, 2, 1),
    MlaTile(32, 32, 3, 2, 2, 1, 1),
    MlaTile(16, 32, 2, 1, 4, 1, 2),
    MlaTile(16, 32, 3, 1, 4, 1, 1),
    MlaTile(16, 32, 2, 1, 4, 1, 1),
)


_WORK_BYTES = 64  # of the struct in roles/mla_decode/work.cuh


@dataclass(frozen=True, kw_only=True)
class MlaDecodeSpec(KernelSpec):
    """What changes the machine code of an MLA decode kernel, and nothing else."""

    family: ClassVar[str] = "mla_decode"
    symbol: ClassVar[str] = "mla_decode"
    template: ClassVar[str] = "kernels/mla_decode.cu.j2"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        pointer("query", "const u16"),
        pointer("cache", "const unsigned char"),
        pointer("block_tables", "const int"),
        pointer("seq_lens", "const int"),
        pointer("cum_seq_lens_q", "const int"),
        pointer("bmm1_scale_tensor", "const float"),
        pointer("bmm2_scale_tensor", "const float"),
        pointer("sinks", "const float"),
        pointer("out", "u16"),
        pointer("lse", "float"),
        pointer("partial_out", "float"),
        pointer("partial_lse", "float"),
        int64("query_stride"),
        int64("query_head_stride"),
        int64("page_stride"),
        int64("token_stride"),
        int64("total_rows"),
        int32("heads"),
        int32("q_len"),
        int32("max_pages"),
        int32("block_tables_stride"),
        int32("num_pages"),
        int32("row_tiles"),
        int32("splits"),
        float32("bmm1_scale"),
        float32("bmm2_scale"),
        float32("lse_factor"),
    )

    query_dtype: DType
    kv_dtype: DType
    kv_lora_rank: int
    qk_rope_head_dim: int
    page_size: int  # tokens
    tile_rows: int
    tile_tokens: int
    stages: int
    row_warps: int
    token_warps: int
    dim_warps: int
    blocks_per_sm: int

    @property
    def head_dim_qk(self) -> int:
        """Elements of a query row and of a cached token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def head_dim_vo(self) -> int:
        """Elements of an output row, the first of a cached token."""
        return self.kv_lora_rank

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return self.row_warps * self.token_warps * 32

    def serves(self, rows: int) -> bool:
        """Whether a call of ``rows`` rows (heads times query tokens) takes this kernel."""
        return self == mla_decode_spec(
            arch=self.arch,
            query_dtype=self.query_dtype,
            kv_dtype=self.kv_dtype,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            page_size=self.page_size,
            rows=rows,
        )

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one block, as roles/mla_decode/shared_memory.cuh lays it out."""
        elements = (
            self.tile_rows * self.head_dim_qk
            + self.stages * self.tile_tokens * self.head_dim_qk
            + self.tile_rows * self.tile_tokens
        )
        words = self.tile_rows * (self.token_warps + 3)
        return elements * self.query_dtype.bytes + words * 4 + _WORK_BYTES


def mla_decode_spec(
    *,
    arch: Arch,
    query_dtype: DType,
    kv_dtype: DType,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    page_size: int,
    rows: int,
) -> MlaDecodeSpec:
    """Return the kernel that serves requests of ``rows`` rows (heads times query tokens).

    Raises
    ------
    UnsupportedError
        If no row of :data:`SUPPORTED` covers the request; the message lists the nearest.
    """
    require_supported(query_dtype, kv_dtype, kv_lora_rank, qk_rope_head_dim, page_size)
    chosen = None
    for tile in TILES:
        spec = MlaDecodeSpec(
            arch=arch,
            query_dtype=query_dtype,
            kv_dtype=kv_dtype,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            page_size=page_size,
            **tile._asdict(),
        )
        if not _fits(spec) or (chosen is not None and chosen.tile_rows == tile.tile_rows):
            continue
        if chosen is None or rows <= tile.tile_rows:
            chosen = spec
    assert chosen is not None, f"no tile fits {arch}"
    return chosen


def mla_decode_specs(arch: Arch) -> Iterator[MlaDecodeSpec]:
    """Yield every MLA decode kernel that ``arch`` may be asked for, each once."""
    for row in SUPPORTED:
        for page_size in row.page_sizes:
            specs = {
                mla_decode_spec(
                    arch=arch,
                    query_dtype=row.query_dtype,
                    kv_dtype=row.kv_dtype,
                    kv_lora_rank=row.kv_lora_rank,
                    qk_rope_head_dim=row.qk_rope_head_dim,
                    page_size=page_size,
                    rows=tile.tile_rows,
                ): None
                for tile in TILES
            }
            yield from specs


def _fits(spec: MlaDecodeSpec) -> bool:
    # The driver keeps 1 KiB of every block's shared memory for itself; a whole SM has 1 KiB more
    # than one block may have.
    per_block = spec.shared_bytes + 1024
    return per_block * spec.blocks_per_sm <= spec.arch.shared_bytes + 1024


def require_supported(
    query_dtype: DType, kv_dtype: DType, kv_lora_rank: int, qk_rope_head_dim: int, page_size: int
) -> None:
    """Refuse what no row of :data:`SUPPORTED` covers.

    Raises
    ------
    UnsupportedError
        With the nearest that is covered in the message.
    """
    asked = (
        f"query {query_dtype}, cache {kv_dtype}, kv_lora_rank {kv_lora_rank}, "
        f"qk_rope_head_dim {qk_rope_head_dim}"
    )
    for row in SUPPORTED:
        if (row.query_dtype, row.kv_dtype, row.kv_lora_rank, row.qk_rope_head_dim) == (
            query_dtype,
            kv_dtype,
            kv_lora_rank,
            qk_rope_head_dim,
        ):
            if page_size in row.page_sizes:
                return
            sizes = ", ".join(map(str, row.page_sizes))
            raise UnsupportedError(
                f"no MLA decode kernel for {asked}, page_size {page_size}; page_size may be {sizes}"
            )
    rows = "; ".join(
        f"query {row.query_dtype}, cache {row.kv_dtype}, kv_lora_rank {row.kv_lora_rank}, "
        f"qk_rope_head_dim {row.qk_rope_head_dim}"
        for row in SUPPORTED
    )
    raise UnsupportedError(f"no MLA decode kernel for {asked}; supported: {rows}")
