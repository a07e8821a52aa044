"""Sparse MLA over two pools on the CPU: the source of the sm80 kernel, with fibers for threads."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import cycle

import pytest
import torch

from mlagen.families.dispatch import MLA
from mlagen.families.mla import launch as mla_launch
from mlagen.families.mla import plan as mla_plan
from mlagen.families.mla.problem import check_problem
from mlagen.mla import trtllm_batch_decode_sparse_mla_dsv4
from mlagen.spec.arch import Arch
from tests.emulator.emulated import COMPILER, replace_launches
from tests.families.launches import record_launches
from tests.kernels import SM_80, SM_90A
from tests.problems.dsv4 import Dsv4Case
from tests.problems.dsv4_cases import CASES

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

# Architectures with and without an instruction for e4m3, with other tiles, and SMs for a split of
# each list and for several.
_GPUS = ((SM_80, 1), (SM_90A, 9), (SM_90A, 1), (SM_80, 6), (SM_90A, 40))


@pytest.mark.parametrize(
    ("case", "gpu"),
    [*zip(CASES, cycle(_GPUS), strict=False)],
    ids=lambda value: value.name if isinstance(value, Dsv4Case) else f"{value[0]}, {value[1]} SMs",
)
def test_every_edge_case_is_right_on_sm80(
    case: Dsv4Case, gpu: tuple[Arch, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the tolerance of float64; every byte that no list names is NaN."""
    arch, sm_count = gpu
    record_launches(monkeypatch, arch=arch)
    replace_launches(monkeypatch, mla_plan, sm_count=sm_count, seed=0)
    problem = case.build("cpu")
    function = inspect.getclosurevars(trtllm_batch_decode_sparse_mla_dsv4).nonlocals["function"]
    workspace = torch.full((1 << 25,), 0xFF, dtype=torch.uint8)
    args = function(**problem.arguments(return_lse=True, workspace_buffer=workspace))
    checked = check_problem(args)
    on_gpu = replace(checked, device=torch.device("cuda", 0))
    launcher = mla_launch.make_sm80_launcher(args, on_gpu)
    out, lse = MLA.launch(replace(launcher, problem=checked), args)
    problem.check(out, lse)
