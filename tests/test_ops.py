"""torch.compile and AOTInductor around the entry points, on the CPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

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
