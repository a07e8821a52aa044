"""Spec of the kernel that combines attention states of disjoint keys, outputs with their LSE."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mlagen.spec.arch import Arch
from mlagen.spec.combine import combine_specs
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import KernelSpec, Parameter, float32, int32, int64, pointer

LANE_DIMS = 4  # that a lane loads at a time


@dataclass(frozen=True, kw_only=True)
class CombineStatesSpec(KernelSpec):
    """Everything that determines the cubin of a kernel of this family."""

    family: ClassVar[str] = "combine_states"
    symbol: ClassVar[str] = "combine_states"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        pointer("first_out", "const unsigned char"),
        pointer("first_lse", "const float"),
        pointer("other_out", "const unsigned char"),
        pointer("other_lse", "const float"),
        pointer("mask", "const unsigned char"),
        pointer("out", "unsigned char"),
        pointer("lse", "float"),
        int64("total_rows"),
        int64("first_out_stride"),
        int64("first_out_head_stride"),
        int64("first_lse_stride"),
        int64("first_lse_head_stride"),
        int64("other_out_stride"),
        int64("other_out_state_stride"),
        int64("other_out_head_stride"),
        int64("other_lse_stride"),
        int64("other_lse_state_stride"),
        int64("other_lse_head_stride"),
        int64("out_stride"),
        int64("out_head_stride"),
        int64("lse_stride"),
        int64("lse_head_stride"),
        int32("heads"),
        int32("num_others"),
        float32("lse_factor"),
    )

    dtype: DType  # of all outputs
    head_dim_vo: int

    @property
    def stores_e4m3(self) -> bool:
        """False: e4m3 is no dtype of an output with LSE."""
        return False

    @property
    def threads(self) -> int:
        """Threads per CTA; a warp takes a row."""
        return 128

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA: none."""
        return 0


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
