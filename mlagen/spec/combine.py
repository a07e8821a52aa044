"""Specs of the kernels that combine: split-KV partials of sm80 kernels, and attention states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.fixed_splits import ROW_SPLITS_PARAMETERS
from mlagen.spec.gqa import variant as gqa
from mlagen.spec.gqa.variant import GqaSpec
from mlagen.spec.kernel import KernelSpec, Parameter, parameters
from mlagen.spec.mla.variant import SUPPORTED, MlaKernelSpec, output_dtype

_SLICE_DIMS = 128
LANE_DIMS = 4  # that a lane loads at a time, of attention states


@dataclass(frozen=True, kw_only=True)
class CombineSpec(KernelSpec):
    """Everything that determines the cubin of a combine kernel."""

    family: ClassVar[str] = "combine"
    common_parameters: ClassVar[tuple[Parameter, ...]] = parameters(
        """
        const float*: partial_out partial_lse bmm2_scale_tensor sinks
        unsigned char*: out
        float*: lse
        i64: total_rows
        int: heads num_splits
        float: bmm2_scale output_factor lse_factor
        """
    )

    threads: ClassVar[int] = 128  # per CTA
    shared_bytes: ClassVar[int] = 0  # all of it is static

    dtype: DType  # of the output
    head_dim_vo: int
    batch_invariant: bool = False  # rows have splits of their own
    has_output_gate: bool = False

    @property
    def added_parameters(self) -> tuple[Parameter, ...]:
        """Parameters of this kernel besides the common ones."""
        splits = ROW_SPLITS_PARAMETERS if self.batch_invariant else ()
        return (*splits, *gqa.OUTPUT_GATE_PARAMETERS) if self.has_output_gate else splits

    @property
    def stores_e4m3(self) -> bool:
        """Whether the output is e4m3."""
        return self.dtype is DType.E4M3

    @property
    def slices(self) -> int:
        """CTAs per output row."""
        return -(-self.head_dim_vo // _SLICE_DIMS)


@dataclass(frozen=True, kw_only=True)
class CombineStatesSpec(KernelSpec):
    """Everything that determines the cubin of a kernel that combines states of disjoint keys."""

    family: ClassVar[str] = "combine_states"
    parameters: ClassVar[tuple[Parameter, ...]] = parameters(
        """
        const unsigned char*: first_out
        const float*: first_lse
        const unsigned char*: other_out
        const float*: other_lse
        const unsigned char*: mask
        unsigned char*: out
        float*: lse
        i64: total_rows first_out_stride first_out_head_stride first_lse_stride
            first_lse_head_stride other_out_stride other_out_state_stride other_out_head_stride
            other_lse_stride other_lse_state_stride other_lse_head_stride out_stride
            out_head_stride lse_stride lse_head_stride
        int: heads num_others
        float: lse_factor
        """
    )

    threads: ClassVar[int] = 128  # per CTA; a warp takes a row
    shared_bytes: ClassVar[int] = 0
    stores_e4m3: ClassVar[bool] = False  # e4m3 is no dtype of an output with LSE

    dtype: DType  # of all outputs
    head_dim_vo: int


def combine_spec(spec: MlaKernelSpec | GqaSpec) -> CombineSpec:
    """Return the kernel that combines the splits of another one."""
    return CombineSpec(
        arch=spec.arch,
        dtype=spec.out_dtype,
        head_dim_vo=spec.head_dim_vo,
        batch_invariant=spec.variant.batch_invariant,
        has_output_gate=isinstance(spec, GqaSpec) and spec.variant.has_output_gate,
    )


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


def combine_states_spec(arch: Arch, dtype: DType, head_dim_vo: int) -> CombineStatesSpec | None:
    """Return the kernel for states of a dtype, or None if unsupported."""
    if not dtype.is_16bit or head_dim_vo % LANE_DIMS:
        return None
    return CombineStatesSpec(arch=arch, dtype=dtype, head_dim_vo=head_dim_vo)


def combine_states_specs(arch: Arch) -> Iterator[CombineStatesSpec]:
    """Yield every kernel of this family that prewarming covers for ``arch``, each once."""
    for combine in combine_specs(arch):
        spec = combine_states_spec(arch, combine.dtype, combine.head_dim_vo)
        if spec is not None:
            yield spec
