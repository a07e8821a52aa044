"""MLA decode on Hopper with query and cache in e4m3: what its kernels are specialised for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import CallShape, KernelSpec, Parameter
from mlagen.spec.mla_hopper import TILE_ROWS, MlaHopperSpec, tile_rows_for
from mlagen.spec.mla_support import SUPPORTED, MlaVariant

_BLOCK_TOKENS = 64
_LEAST_BOX_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class MlaHopperE4m3Spec(KernelSpec):
    """What changes the machine code of such a kernel, and nothing else."""

    family: ClassVar[str] = "mla_hopper_e4m3"
    symbol: ClassVar[str] = "mla_hopper_e4m3"
    template: ClassVar[str] = "kernels/mla_hopper_e4m3.cu.j2"
    # Not before it has run on a GPU as it is now: docs/measurements.md says what has.
    is_automatic: ClassVar[bool] = False
    parameters: ClassVar[tuple[Parameter, ...]] = MlaHopperSpec.parameters

    variant: MlaVariant
    tile_rows: int

    @property
    def head_dim_qk(self) -> int:
        """Elements of a query row and of a cached token."""
        return self.variant.kv_lora_rank + self.variant.qk_rope_head_dim

    @property
    def head_dim_vo(self) -> int:
        """Elements of an output row, the first of a cached token."""
        return self.variant.kv_lora_rank

    @property
    def box_tokens(self) -> int:
        """Tokens that one copy brings: of one page."""
        return math.gcd(self.variant.page_size, _BLOCK_TOKENS)

    @property
    def converts_rows(self) -> bool:
        """Whether rows become elements of another type on their way."""
        return False

    @property
    def consumer_warps(self) -> int:
        """Warps that multiply values."""
        return 8

    @property
    def row_scales(self) -> int:
        """Scales that a row of a piece has in the workspace."""
        return 1

    @property
    def threads(self) -> int:
        """Threads of one block: with the four warps that score, and four that load."""
        return self.consumer_warps * 32 + 256

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one block: all there is."""
        return self.arch.shared_bytes

    @property
    def is_cooperative(self) -> bool:
        """Whether blocks wait for each other: for the pieces of a request that they share."""
        return True

    def serves(self, call: CallShape) -> bool:
        """Whether such a call takes this kernel, of those that differ in the tile only."""
        return self.tile_rows == tile_rows_for(call.heads * call.q_len)


def mla_hopper_e4m3_spec(arch: Arch, variant: MlaVariant, rows: int) -> MlaHopperE4m3Spec | None:
    """Return the kernel for requests of ``rows`` rows; None where there is none."""
    is_covered = (
        arch.has_wgmma
        and (variant.query_dtype, variant.kv_dtype) == (DType.E4M3, DType.E4M3)
        and (variant.kv_lora_rank, variant.qk_rope_head_dim) == (512, 64)
        and (variant.lookup, variant.values, variant.mask) == ("paged", "shared", "causal")
        and math.gcd(variant.page_size, _BLOCK_TOKENS) >= _LEAST_BOX_TOKENS
    )
    if not is_covered:
        return None
    return MlaHopperE4m3Spec(arch=arch, variant=variant, tile_rows=tile_rows_for(rows))


def mla_hopper_e4m3_specs(arch: Arch) -> Iterator[MlaHopperE4m3Spec]:
    """Yield every kernel of this family that ``arch`` may be asked for, each once."""
    for row in SUPPORTED:
        for variant in row.variants():
            for rows in TILE_ROWS:
                spec = mla_hopper_e4m3_spec(arch, variant, rows)
                if spec is not None:
                    yield spec
