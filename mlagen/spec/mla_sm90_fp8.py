"""MLA decode on Hopper with query and cache in e4m3: what its kernels are specialised for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.mla_sm90 import MlaSm90Fp8Base, block_m_for, copies_pages, specs_found
from mlagen.spec.mla_support import MlaVariant


@dataclass(frozen=True, kw_only=True)
class MlaSm90Fp8Spec(MlaSm90Fp8Base):
    """What changes the machine code of such a kernel, and nothing else."""

    family: ClassVar[str] = "mla_sm90_fp8"
    symbol: ClassVar[str] = "mla_sm90_fp8"
    template: ClassVar[str] = "kernels/mla_sm90_fp8/kernel.cu.j2"

    @property
    def small_calls(self) -> tuple[tuple[int, int], ...]:
        """Up to so many rows of a request, the blocks of tokens that the sm80 kernel is for."""
        return ((16, 64),)

    @property
    def copies_tile_groups(self) -> bool:
        """Whether a copy brings a third of a block's tiles."""
        return False


def mla_sm90_fp8_spec(arch: Arch, variant: MlaVariant, rows: int) -> MlaSm90Fp8Spec | None:
    """Return the kernel for requests of ``rows`` rows; None where there is none."""
    is_e4m3 = (variant.query_dtype, variant.kv_dtype) == (DType.E4M3, DType.E4M3)
    if not (is_e4m3 and copies_pages(arch, variant)):
        return None
    return MlaSm90Fp8Spec(arch=arch, variant=variant, block_m=block_m_for(rows))


def mla_sm90_fp8_specs(arch: Arch) -> Iterator[MlaSm90Fp8Spec]:
    """Yield every kernel of this family that ``arch`` may be asked for, each once."""
    return specs_found(arch, mla_sm90_fp8_spec)
