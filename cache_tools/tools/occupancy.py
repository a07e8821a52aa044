"""CTAs of a kernel that fit on an SM, without a GPU.

The limits are those of the CUDA C++ Programming Guide, table "Technical Specifications per Compute
Capability".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlagen.spec.arch import Arch

_REGISTERS = 65536  # of an SM
_REGISTER_UNIT = 256  # registers are allocated to a warp in multiples
_SUB_PARTITIONS = 4  # of an SM; a warp stays in one

# Warps and CTAs of an SM, where there are fewer than 64 and 32.
_MAX_WARPS = dict.fromkeys((86, 87, 89, 110, 120, 121), 48)
_MAX_CTAS = {**dict.fromkeys((86, 87), 16), **dict.fromkeys((89, 110, 120, 121), 24)}


def ctas_per_sm(arch: Arch, *, threads: int, registers: int, shared_bytes: int) -> int:
    """Return how many CTAs of that size an SM holds at once.

    Parameters
    ----------
    arch
        The target.
    threads
        Threads of a CTA.
    registers
        Registers of a thread at the launch.
    shared_bytes
        Static and dynamic shared memory of a CTA.
    """
    warps = -(-threads // 32)
    warp_registers = max(1, -(-registers * 32 // _REGISTER_UNIT)) * _REGISTER_UNIT
    per_sub_partition = _REGISTERS // _SUB_PARTITIONS // warp_registers
    by_registers = per_sub_partition * _SUB_PARTITIONS // warps
    by_warps = _MAX_WARPS.get(arch.number, 64) // warps
    count = min(by_registers, by_warps, _MAX_CTAS.get(arch.number, 32))
    while count and not arch.fits(shared_bytes, count):
        count -= 1
    return count
