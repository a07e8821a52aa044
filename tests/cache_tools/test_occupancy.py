"""CTAs of a kernel that fit on an SM."""

from __future__ import annotations

import pytest

from cache_tools.tools.occupancy import ctas_per_sm
from mlagen.spec.arch import parse_arch


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared_bytes", "expected"),
    [
        ("sm_90a", 384, 168, 232448, 1),  # shared memory
        ("sm_90a", 128, 182, 113488, 2),
        ("sm_90a", 128, 80, 2064, 6),  # registers
        ("sm_90a", 256, 255, 0, 1),
        ("sm_90a", 1024, 32, 0, 2),  # warps
        ("sm_89", 1024, 32, 0, 1),
        ("sm_80", 32, 16, 0, 32),  # CTAs
        ("sm_86", 32, 16, 0, 16),
        ("sm_80", 1024, 128, 0, 0),  # too large for any SM
    ],
)
def test_the_scarcest_resource_is_the_limit(
    arch: str, threads: int, registers: int, shared_bytes: int, expected: int
) -> None:
    """The count is that of the CUDA occupancy calculator."""
    found = ctas_per_sm(
        parse_arch(arch), threads=threads, registers=registers, shared_bytes=shared_bytes
    )

    assert found == expected
