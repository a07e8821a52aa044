"""torch.compile and AOTInductor around the entry points, on the CPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mlagen.runtime.device import DeviceFacts
from mlagen.torch_ops import library as op_library
from tests.ops_cases import Tensors
from tests.ops_semantics import Layer, OpsSemantics


class TestOnTheCpu(OpsSemantics):
    """Semantics of compiled code, without a GPU."""

    device = "cpu"


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")
@pytest.mark.filterwarnings("ignore")  # of Inductor, about itself
def test_a_package_of_aotinductor_runs(tmp_path: Path) -> None:
    """A layer compiled ahead of time equals the eager one."""
    case = TestOnTheCpu()
    layer = Layer(of := Tensors("cpu"))
    program = torch.export.export(layer, inputs := case.layer_inputs(of))

    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "layer.pt2")
    )

    run = torch._inductor.aoti_load_package(path)
    assert torch.equal(run(*inputs), layer(*inputs))


@pytest.mark.parametrize("is_capturing", [False, True])
def test_semaphores_are_reserved_before_a_capture(
    is_capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls outside a capture reserve spare semaphores, and calls in one allocate none."""
    facts = DeviceFacts(index=1, name="", major=9, minor=0, sm_count=132, memory_bytes=0)
    reserved: list[tuple[int, int]] = []
    monkeypatch.setattr(op_library, "is_capturing", lambda _: is_capturing)
    monkeypatch.setattr(op_library, "device_facts", lambda _: facts)
    monkeypatch.setattr(op_library, "reserve_semaphores", lambda *given: reserved.append(given))
    monkeypatch.setattr(torch, "empty", lambda size, **_: size)

    size = op_library.workspace_for(torch.device("cuda", 1))

    assert reserved == ([] if is_capturing else [(1, op_library._SPARE_REGIONS)])
    assert size >= 132 * 513 * 1024
