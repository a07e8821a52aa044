"""Grouped-query decode calls with recorded launches; needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mlagen.decode
import mlagen.xqa
from mlagen.families.gqa import dispatch as gqa_call
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.problem import check_problem
from mlagen.settings import current_settings
from tests.families.launches import GQA_PATHS, Launch, record_launches
from tests.problems.entry_points import xqa_arguments
from tests.problems.gqa import GqaCase


def args_of(case: GqaCase, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> GqaArgs:
    """Return the arguments that the entry point makes for a case, with some fields changed."""
    seen: list[GqaArgs] = []
    problem = case.build("cpu")

    def run(inputs: GqaArgs, *_: object) -> tuple[torch.Tensor, ...]:
        seen.append(inputs)
        return (problem.query if inputs.out is None else inputs.out,)

    with monkeypatch.context() as patch:
        patch.setattr(gqa_call.GQA, "run", run)
        mlagen.decode.xqa_batch_decode_with_kv_cache(**problem.arguments())
    return seen[0]._replace(**changes)


def xqa_args_of(case: GqaCase, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> GqaArgs:
    """Return the arguments that ``xqa`` makes for a case."""
    seen: list[GqaArgs] = []
    arguments = xqa_arguments(case.build("cpu"))

    def run(inputs: GqaArgs, *_: object) -> tuple[torch.Tensor, ...]:
        seen.append(inputs)
        return (arguments["output"],)

    with monkeypatch.context() as patch:
        patch.setattr(gqa_call.GQA, "run", run)
        mlagen.xqa.xqa(**arguments)
    return seen[0]._replace(**changes)


def launches_of(
    inputs: GqaArgs, monkeypatch: pytest.MonkeyPatch, kernel: str = "sm80"
) -> tuple[gqa_call.GqaLauncher, torch.Tensor, list[Launch]]:
    """Run a call, and return its recorded launches with their values by name."""
    launches = record_launches(monkeypatch, paths=GQA_PATHS)
    request = check_problem(inputs)
    on_a_gpu = replace(request, device=torch.device("cuda", 0))
    settings = replace(current_settings(), gqa_kernel=kernel)
    call = replace(gqa_call.plan_call(inputs, on_a_gpu, settings), problem=request)
    return call, gqa_call.GQA.launch(call, inputs, enable_pdl=True)[0], launches
