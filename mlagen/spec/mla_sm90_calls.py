"""Which sm90 kernels there are for an MLA decode call, of all families of them."""

from __future__ import annotations

from collections.abc import Iterator

from mlagen.spec.arch import Arch
from mlagen.spec.mla_sm90 import MlaSm90Spec, mla_sm90_spec
from mlagen.spec.mla_sm90_fp8 import mla_sm90_fp8_spec
from mlagen.spec.mla_sm90_fp8kv import mla_sm90_fp8kv_spec
from mlagen.spec.mla_support import MlaVariant


def mla_sm90_kernels(arch: Arch, variant: MlaVariant, rows: int) -> Iterator[MlaSm90Spec]:
    """Yield the sm90 kernels for requests of ``rows`` rows, the fastest first.

    Of a sparse call every query token is a request.
    """
    for find in (mla_sm90_spec, mla_sm90_fp8_spec, mla_sm90_fp8kv_spec):
        spec = find(arch, variant, rows)
        if spec is not None:
            yield spec


def mla_sm90_kernel(
    arch: Arch, variant: MlaVariant, rows: int, p_dtype_choice: str
) -> MlaSm90Spec | None:
    """Return the one that a call takes; None where there is none.

    ``p_dtype_choice`` is what the settings ask for: ``fp16`` leaves those out that round them to 8
    bits.
    """
    for spec in mla_sm90_kernels(arch, variant, rows):
        if p_dtype_choice == "auto" or spec.p_dtype.is_16bit:
            return spec
    return None
