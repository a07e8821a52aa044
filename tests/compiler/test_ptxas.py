"""ptxas output in the compile log, of several releases."""

from __future__ import annotations

import pytest

from mlagen.artifacts import Resources
from mlagen.compiler.ptxas import parse_resources

LOG_12_8 = """\
ptxas info    : 32 bytes gmem, 64 bytes cmem[4]
ptxas info    : Compiling entry function 'combine' for 'sm_80'
ptxas info    : Function properties for combine
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 2064 bytes smem, 424 bytes cmem[0]
ptxas info    : Compile time = 24.113 ms
"""

LOG_13_0 = """\
ptxas info    : 120 bytes gmem, 240 bytes cmem[4]
ptxas info    : Compiling entry function 'mla_sm80' for 'sm_80'
ptxas info    : Function properties for mla_sm80
ptxas         .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 249 registers, used 1 barriers, 528 bytes cmem[0], 32 bytes cmem[2]
ptxas info    : Compile time = 326.021 ms
"""

LOG_13_5 = """\
ptxas info    : (C7517) wgmma.wait_group is injected in around line 36 by compiler to allow use \
of registers defined by GMMA in function 'wide'
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the wgmma pipeline in the function 'wide' in line 34
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the wgmma pipeline in the function 'wide' in line 58
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'narrow' for 'sm_90a'
ptxas info    : Function properties for narrow
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compile time = 1.447 ms
ptxas info    : Compiling entry function 'wide' for 'sm_90a'
ptxas info    : Function properties for wide
ptxas         .     256 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 256 bytes cumulative stack size, 400 bytes smem
ptxas info    : Compile time = 5.755 ms
ptxas info    : Function properties for _Z1fPii
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def resources(symbol: str, registers: int, *sizes: int) -> Resources:
    """Return resources with the sizes in the order of the log: stack, stores, loads, shared."""
    stack_bytes, store_bytes, load_bytes, shared_bytes = sizes
    return Resources(
        symbol=symbol,
        registers=registers,
        stack_bytes=stack_bytes,
        spill_store_bytes=store_bytes,
        spill_load_bytes=load_bytes,
        static_shared_bytes=shared_bytes,
    )


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (LOG_12_8, (resources("combine", 32, 0, 0, 0, 2064),)),
        (LOG_13_0, (resources("mla_sm80", 249, 16, 12, 8, 0),)),
        (LOG_13_5, (resources("narrow", 8, 0, 0, 0, 0), resources("wide", 32, 256, 0, 0, 400))),
        ("", ()),
    ],
    ids=["12.8", "13.0", "13.5 with two kernels and a function", "an empty log"],
)
def test_resources_of_every_kernel_in_a_log(log: str, expected: tuple[Resources, ...]) -> None:
    """Registers, stack, spills and static shared memory, for entry functions only."""
    found = parse_resources(log)
    assert found == expected
    assert [one.has_spills for one in found] == [one.spill_store_bytes > 0 for one in expected]
