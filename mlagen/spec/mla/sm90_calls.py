"""Selection of the sm90 kernel of an MLA decode call, across the sm90 families."""

from __future__ import annotations

from collections.abc import Iterator

from mlagen.spec.arch import Arch
from mlagen.spec.mla.sm90 import MlaSm90Spec, mla_sm90_spec
from mlagen.spec.mla.sm90_fp8 import mla_sm90_fp8_spec
from mlagen.spec.mla.sm90_fp8kv import mla_sm90_fp8kv_spec
from mlagen.spec.mla.variant import MlaVariant


def mla_sm90_kernels(arch: Arch, variant: MlaVariant, rows: int) -> Iterator[MlaSm90Spec]:
    """Yield the sm90 kernels for ``rows`` query rows per sequence, the fastest first.

    In a sparse call every query token is a sequence of its own.
    """
    for make_spec in (mla_sm90_spec, mla_sm90_fp8_spec, mla_sm90_fp8kv_spec):
        spec = make_spec(arch, variant, rows)
        if spec is not None:
            yield spec


def mla_sm90_kernel(
    arch: Arch, variant: MlaVariant, rows: int, p_dtype_choice: str
) -> MlaSm90Spec | None:
    """Return the sm90 kernel of a call, or None if unsupported.

    ``p_dtype_choice`` is the setting: ``fp16`` excludes the kernels that round P to FP8.
    """
    for spec in mla_sm90_kernels(arch, variant, rows):
        if p_dtype_choice == "auto" or spec.p_dtype.is_16bit:
            return spec
    return None
