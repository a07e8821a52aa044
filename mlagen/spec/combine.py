"""Combining the splits of a decode kernel into the final rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mlagen.spec import gqa
from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import KernelSpec, Parameter, float32, int32, int64, pointer
from mlagen.spec.mla_support import SUPPORTED, output_dtype

_SLICE_DIMS = 128


@dataclass(frozen=True, kw_only=True)
class CombineSpec(KernelSpec):
    """What changes the machine code of the kernel that combines splits, and nothing else."""

    family: ClassVar[str] = "combine"
    symbol: ClassVar[str] = "combine"
    template: ClassVar[str] = "kernels/combine/kernel.cu.j2"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        pointer("partial_out", "const float"),
        pointer("partial_lse", "const float"),
        pointer("bmm2_scale_tensor", "const float"),
        pointer("sinks", "const float"),
        pointer("out", "unsigned char"),
        pointer("lse", "float"),
        int64("total_rows"),
        int32("heads"),
        int32("num_splits"),
        float32("bmm2_scale"),
        float32("output_factor"),
        float32("lse_factor"),
    )

    dtype: DType  # of the output
    head_dim_vo: int

    @property
    def uses_e4m3(self) -> bool:
        """Whether the output is e4m3."""
        return self.dtype is DType.E4M3

    @property
    def slices(self) -> int:
        """Blocks that share one row."""
        return -(-self.head_dim_vo // _SLICE_DIMS)

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return 128

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one block: none, it is static."""
        return 0


def combine_specs(arch: Arch) -> Iterator[CombineSpec]:
    """Yield every combining kernel that prewarming knows for ``arch``, each once."""
    wanted = {
        (output_dtype(row.query_dtype), rank): None
        for row in SUPPORTED
        for rank, _ in row.head_dims
    }
    wanted |= {
        (out_dtype, head_dim): None
        for row in gqa.SUPPORTED
        for out_dtype in row.out_dtypes
        for head_dim in gqa.HEAD_DIMS
    }
    for dtype, head_dim in wanted:
        yield CombineSpec(arch=arch, dtype=dtype, head_dim_vo=head_dim)
