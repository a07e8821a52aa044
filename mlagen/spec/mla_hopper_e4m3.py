"""MLA decode on Hopper with query and cache in e4m3: what its kernels are specialised for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.mla_hopper import MlaHopper8BitSpec, copies_pages, specs_found, tile_rows_for
from mlagen.spec.mla_support import MlaVariant


@dataclass(frozen=True, kw_only=True)
class MlaHopperE4m3Spec(MlaHopper8BitSpec):
    """What changes the machine code of such a kernel, and nothing else."""

    family: ClassVar[str] = "mla_hopper_e4m3"
    symbol: ClassVar[str] = "mla_hopper_e4m3"
    template: ClassVar[str] = "kernels/mla_sm90_fp8/kernel.cu.j2"

    @property
    def small_calls(self) -> tuple[tuple[int, int], ...]:
        """Up to so many rows of a request, the blocks of tokens that the portable kernel is for."""
        return ((16, 64),)

    @property
    def copies_thirds(self) -> bool:
        """Whether a copy brings a third of a block's tiles."""
        return False


def mla_hopper_e4m3_spec(arch: Arch, variant: MlaVariant, rows: int) -> MlaHopperE4m3Spec | None:
    """Return the kernel for requests of ``rows`` rows; None where there is none."""
    is_e4m3 = (variant.query_dtype, variant.kv_dtype) == (DType.E4M3, DType.E4M3)
    if not (is_e4m3 and copies_pages(arch, variant)):
        return None
    return MlaHopperE4m3Spec(arch=arch, variant=variant, tile_rows=tile_rows_for(rows))


def mla_hopper_e4m3_specs(arch: Arch) -> Iterator[MlaHopperE4m3Spec]:
    """Yield every kernel of this family that ``arch`` may be asked for, each once."""
    return specs_found(arch, mla_hopper_e4m3_spec)
