"""Base of the specs of MLA kernels: their variant, and the parameters that it adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mlagen.spec.kernel import KernelSpec, Parameter, int32, pointer
from mlagen.spec.mla.variant import MlaVariant

# Of decode context parallel.
_DCP_PARAMETERS = (
    pointer("causal_seqlens_kv_global", "const int"),
    int32("cp_world"),
    int32("cp_rank"),
)
_ORDER = ("128s", "Q", "q", "i", "f")  # of codes


@dataclass(frozen=True, kw_only=True)
class MlaKernelSpec(KernelSpec):
    """What the specs of MLA kernels have in common."""

    common_parameters: ClassVar[tuple[Parameter, ...]]  # of every variant

    variant: MlaVariant

    @property
    def has_dcp(self) -> bool:
        """Whether the KV cache has the tokens of one rank of decode context parallel."""
        return self.variant.mask == "dcp"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters of every variant, and those of this one."""
        if not self.has_dcp:
            return self.common_parameters
        parameters = (*self.common_parameters, *_DCP_PARAMETERS)
        return tuple(sorted(parameters, key=lambda one: _ORDER.index(one.code)))
