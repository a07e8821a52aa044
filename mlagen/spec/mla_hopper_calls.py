"""Which Hopper kernel there is for an MLA decode call, of all families of them."""

from __future__ import annotations

from mlagen.spec.arch import Arch
from mlagen.spec.mla_hopper import MlaHopperSpec, mla_hopper_spec
from mlagen.spec.mla_hopper_e4m3 import mla_hopper_e4m3_spec
from mlagen.spec.mla_hopper_packed import mla_hopper_packed_spec
from mlagen.spec.mla_support import MlaVariant


def mla_hopper_kernel(arch: Arch, variant: MlaVariant, rows: int) -> MlaHopperSpec | None:
    """Return the Hopper kernel for requests of ``rows`` rows; None where there is none.

    Of a sparse call every query token is a request.
    """
    return (
        mla_hopper_spec(arch, variant, rows)
        or mla_hopper_e4m3_spec(arch, variant, rows)
        or mla_hopper_packed_spec(arch, variant, rows)
    )
