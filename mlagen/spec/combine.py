"""Combining the splits of a decode kernel into the final rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import KernelSpec, Parameter, float32, int32, int64, pointer
from mlagen.spec.mla import SUPPORTED


@dataclass(frozen=True, kw_only=True)
class CombineSplitsSpec(KernelSpec):
    """What changes the machine code of the kernel that combines splits, and nothing else."""

    family: ClassVar[str] = "combine_splits"
    symbol: ClassVar[str] = "combine_splits"
    template: ClassVar[str] = "kernels/combine_splits.cu.j2"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        pointer("partial_out", "const float"),
        pointer("partial_lse", "const float"),
        pointer("bmm2_scale_tensor", "const float"),
        pointer("sinks", "const float"),
        pointer("out", "u16"),
        pointer("lse", "float"),
        int64("total_rows"),
        int32("heads"),
        int32("splits"),
        float32("bmm2_scale"),
        float32("lse_factor"),
    )

    dtype: DType  # of the output
    head_dim_vo: int

    @property
    def slices(self) -> int:
        """Blocks that share one row: each takes 128 elements."""
        return self.head_dim_vo // 128

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return 128

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one block: none, it is static."""
        return 0


def combine_splits_specs(arch: Arch) -> Iterator[CombineSplitsSpec]:
    """Yield every combining kernel that ``arch`` may be asked for, each once."""
    specs = {
        CombineSplitsSpec(arch=arch, dtype=row.query_dtype, head_dim_vo=row.kv_lora_rank): None
        for row in SUPPORTED
    }
    yield from specs
