"""Which Hopper kernels there are for an MLA decode call, of all families of them."""

from __future__ import annotations

from collections.abc import Iterator

from mlagen.spec.arch import Arch
from mlagen.spec.mla_hopper import MlaHopperSpec, mla_hopper_spec
from mlagen.spec.mla_hopper_e4m3 import mla_hopper_e4m3_spec
from mlagen.spec.mla_hopper_packed import mla_hopper_packed_spec
from mlagen.spec.mla_support import MlaVariant


def mla_hopper_kernels(arch: Arch, variant: MlaVariant, rows: int) -> Iterator[MlaHopperSpec]:
    """Yield the Hopper kernels for requests of ``rows`` rows, the fastest first.

    Of a sparse call every query token is a request.
    """
    for find in (mla_hopper_spec, mla_hopper_e4m3_spec, mla_hopper_packed_spec):
        spec = find(arch, variant, rows)
        if spec is not None:
            yield spec


def mla_hopper_kernel(
    arch: Arch, variant: MlaVariant, rows: int, probabilities: str
) -> MlaHopperSpec | None:
    """Return the one that a call takes; None where there is none.

    ``probabilities`` is what the settings ask for: ``fp16`` leaves those out that round them to 8
    bits.
    """
    for spec in mla_hopper_kernels(arch, variant, rows):
        if probabilities == "auto" or spec.probability_dtype.is_16bit:
            return spec
    return None
