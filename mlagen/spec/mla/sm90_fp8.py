"""Spec of the sm90 MLA decode kernels with query and KV cache in e4m3, and the base of FP8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.mla.sm90 import MlaSm90Spec, block_m_for, supported_specs, supports_tma
from mlagen.spec.mla.variant import MlaVariant


@dataclass(frozen=True, kw_only=True)
class MlaSm90Fp8Base(MlaSm90Spec):
    """Base spec of the FP8 families, whose QK GEMM and softmax have a warpgroup of their own."""

    smaller_tiles: ClassVar[tuple[tuple[int, int], ...]] = ((16, 3), (32, 6))

    @property
    def folder(self) -> str:
        """Folder of the kernel's own templates."""
        return f"kernels/{self.family}"

    @property
    def loading_warps(self) -> int:
        """Producer warps that load KV; beside TMA the others are scheduler warps."""
        return 1 if self.uses_tma else 4

    @property
    def pv_warps(self) -> int:
        """Warps of the PV warpgroups."""
        return 8

    @property
    def producer_warps(self) -> int:
        """Warps of the producer warpgroup and of the QK warpgroup."""
        return 8


@dataclass(frozen=True, kw_only=True)
class MlaSm90Fp8Spec(MlaSm90Fp8Base):
    """Everything that determines the cubin of a kernel of this family."""

    family: ClassVar[str] = "mla_sm90_fp8"
    symbol: ClassVar[str] = "mla_sm90_fp8"

    @property
    def small_calls(self) -> tuple[tuple[int, int], ...]:
        """(max rows per sequence, max KV blocks) of calls that sm80 runs faster on 132 SMs."""
        return ((16, 64),)

    @property
    def copies_tile_groups(self) -> bool:
        """Whether one TMA copy loads a part of a KV block: never, but all tiles or one."""
        return False


def mla_sm90_fp8_spec(arch: Arch, variant: MlaVariant, rows: int) -> MlaSm90Fp8Spec | None:
    """Return the kernel for ``rows`` query rows per sequence, or None if unsupported."""
    is_e4m3 = (variant.query_dtype, variant.kv_dtype) == (DType.E4M3, DType.E4M3)
    if not (is_e4m3 and supports_tma(arch, variant)):
        return None
    return MlaSm90Fp8Spec(arch=arch, variant=variant, block_m=block_m_for(rows))


def mla_sm90_fp8_specs(arch: Arch) -> Iterator[MlaSm90Fp8Spec]:
    """Yield every kernel of this family that ``arch`` supports, each once."""
    return supported_specs(arch, mla_sm90_fp8_spec)
