"""Calls of MLA whose launches are emulated: what tests of all its kernels have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.families.dispatch import MLA
from mlagen.families.mla import launch as mla_launch
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.problem import check_problem
from mlagen.settings import current_settings
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla.sm90 import semaphore_region_bytes
from tests.emulator import emulated

Results = tuple[torch.Tensor, torch.Tensor]


def words_beside_workspace(max_ctas: int) -> torch.Tensor:
    """Return the words that belong to a workspace, aligned as on a GPU."""
    words = semaphore_region_bytes(max_ctas) // 4
    memory = torch.zeros(words + 32, dtype=torch.int32)
    return memory[-memory.data_ptr() % 128 // 4 :][:words]


def computed(args: MlaArgs, kernel: str) -> Results:
    """Return output and LSE of a call by the ``sm80`` or ``sm90`` kernel."""
    problem = check_problem(args)
    on_gpu = replace(problem, device=torch.device("cuda", 0))
    if kernel == "sm80":
        launcher = MLA.family.sm80_launcher(args, on_gpu)
    else:
        settings = replace(current_settings(), mla_kernel=kernel)
        launcher = mla_launch.make_sm90_launcher(args, on_gpu, settings)
    out, lse = MLA.launch(replace(launcher, problem=problem), args)
    return out, lse


def record_kernels(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """Return a list that receives the kernel of each emulated launch."""
    taken: list[KernelSpec] = []
    launch = emulated.launch

    def noticed(spec: KernelSpec, *others: Any) -> None:
        taken.append(spec)
        launch(spec, *others)

    monkeypatch.setattr(emulated, "launch", noticed)
    return taken
