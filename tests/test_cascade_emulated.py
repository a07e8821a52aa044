"""The kernel that combines states on the CPU: its own source, with fibers for threads."""

from __future__ import annotations

from typing import Any

import pytest

from mlagen.families import states
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.packing import ParameterPacking
from mlagen.spec.kernel import KernelSpec
from tests import test_cascade
from tests.emulator.emulated import COMPILER
from tests.emulator.emulated import launch as emulate
from tests.kernels import SM_80

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


class TestCascadeEmulated(test_cascade.TestCascade):
    """Every merge, by emulated launches where a GPU would launch the kernel."""

    @pytest.fixture(autouse=True)
    def launches(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Return the CTAs of each launch."""
        recorded: list[int] = []

        def launch(kernel: LoadedKernel, blocks: int, _: bool, values: tuple[Any, ...]) -> None:
            recorded.append(blocks)
            emulate(kernel.spec, kernel.packing.struct.pack(*values), blocks, 0)

        def loaded(spec: KernelSpec, _: int) -> LoadedKernel:
            return LoadedKernel(spec, 0, ParameterPacking(spec), None, None)

        monkeypatch.setattr(states, "_gpu_of", lambda _: 0)
        monkeypatch.setattr(states, "arch_of_device", lambda _: SM_80)
        monkeypatch.setattr(states, "kernel_for", loaded)
        monkeypatch.setattr(states, "launch", launch)
        return recorded

    def test_rows_that_are_aligned_take_the_kernel(self, launches: list[int]) -> None:
        """Also strided ones; four rows for a CTA."""
        self.test_rows_do_not_depend_on_strides("cpu")

        assert launches == [3, 3]
