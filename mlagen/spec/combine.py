"""Spec of the combine kernel, which reduces the split-KV partials of the sm80 kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.gqa import variant as gqa
from mlagen.spec.gqa.variant import GqaSpec
from mlagen.spec.kernel import KernelSpec, Parameter, float32, int32, int64, pointer
from mlagen.spec.mla.kernel import MlaKernelSpec
from mlagen.spec.mla.variant import SUPPORTED, output_dtype

_SLICE_DIMS = 128


@dataclass(frozen=True, kw_only=True)
class CombineSpec(KernelSpec):
    """Everything that determines the cubin of a combine kernel."""

    family: ClassVar[str] = "combine"
    symbol: ClassVar[str] = "combine"
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
    def stores_e4m3(self) -> bool:
        """Whether the output is e4m3."""
        return self.dtype is DType.E4M3

    @property
    def slices(self) -> int:
        """CTAs per output row."""
        return -(-self.head_dim_vo // _SLICE_DIMS)

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 128

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA: none, all of it is static."""
        return 0


def combine_spec(spec: MlaKernelSpec | GqaSpec) -> CombineSpec:
    """Return the kernel that combines the splits of another one."""
    return CombineSpec(arch=spec.arch, dtype=spec.out_dtype, head_dim_vo=spec.head_dim_vo)


def combine_specs(arch: Arch) -> Iterator[CombineSpec]:
    """Yield every combine kernel that prewarming covers for ``arch``, each once."""
    outputs = {
        (output_dtype(row.query_dtype), rank): None
        for row in SUPPORTED
        for rank, _ in row.head_dims
    }
    outputs |= {
        (out_dtype, head_dim): None
        for row in gqa.SUPPORTED
        for out_dtype in row.out_dtypes
        for head_dim in gqa.HEAD_DIMS
    }
    for dtype, head_dim in outputs:
        yield CombineSpec(arch=arch, dtype=dtype, head_dim_vo=head_dim)
