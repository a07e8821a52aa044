"""The tests of writers, with emulated launches where a GPU would launch the kernel."""

from __future__ import annotations

from typing import Any

import pytest

from mlagen.families.mla import write
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.packing import ParameterPacking
from mlagen.spec.kernel import KernelSpec
from tests.emulator.emulated import COMPILER
from tests.emulator.emulated import launch as emulate
from tests.fixture_types import Patch
from tests.kernels import SM_80
from tests.writers import test_writers
from tests.writers.test_writers import Filled, _nvfp4, tokens_of

__all__ = ["_nvfp4"]


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
class TestWritersEmulated(test_writers.TestWriters):
    """Every write that a kernel has, by emulated launches."""

    @pytest.fixture(autouse=True)
    def launches(self, monkeypatch: Patch) -> list[int]:
        """Return the CTAs of each launch."""
        recorded: list[int] = []

        def launch(kernel: LoadedKernel, ctas: int, _: bool, values: tuple[Any, ...]) -> None:
            recorded.append(ctas)
            emulate(kernel.spec, kernel.packing.struct.pack(*values), ctas, len(recorded))

        def loaded(spec: KernelSpec, _: int) -> LoadedKernel:
            return LoadedKernel(spec, 0, ParameterPacking(spec), None, None)

        monkeypatch.setattr(write, "_gpu_of", lambda _: 0)
        monkeypatch.setattr(write, "arch_of_device", lambda _: SM_80)
        monkeypatch.setattr(write, "kernel_for", loaded)
        monkeypatch.setattr(write, "launch", launch)
        return recorded

    def test_a_warp_takes_a_token(self, launches: list[int]) -> None:
        """Eight of a CTA."""
        pool = Filled("584", "cpu")

        pool.append(tokens_of("584", 9), [*range(9)])

        assert launches == [2]
