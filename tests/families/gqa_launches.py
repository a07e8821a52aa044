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
from tests.families.launches import GQA_PATHS, Launch, record_launches
from tests.problems.entry_points import xqa_arguments
from tests.problems.gqa import GqaCase


def args_of(case: GqaCase, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> GqaArgs:
    """Return the arguments that the entry point makes for a case, with some fields changed."""
    seen: list[GqaArgs] = []
    monkeypatch.setattr("mlagen.decode.run_gqa", lambda inputs, *_: seen.append(inputs))
    mlagen.decode.xqa_batch_decode_with_kv_cache(**case.build("cpu").arguments())
    return seen[0]._replace(**changes)


def xqa_args_of(case: GqaCase, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> GqaArgs:
    """Return the arguments that ``xqa`` makes for a case."""
    seen: list[GqaArgs] = []
    monkeypatch.setattr("mlagen.xqa.run_gqa", lambda inputs, _: seen.append(inputs))
    mlagen.xqa.xqa(**xqa_arguments(case.build("cpu")))
    return seen[0]._replace(**changes)


def launches_of(
    inputs: GqaArgs, monkeypatch: pytest.MonkeyPatch, kernel: str = "sm80"
) -> tuple[gqa_call.GqaCall, torch.Tensor, list[Launch]]:
    """Run a call, and return its recorded launches with their values by name."""
    launches = record_launches(monkeypatch, paths=GQA_PATHS)
    request = check_problem(inputs)
    on_a_gpu = replace(request, device=torch.device("cuda", 0))
    call = replace(gqa_call._prepare(inputs, on_a_gpu, kernel), problem=request)
    return call, gqa_call._run_on_gpu(call, inputs, enable_pdl=True), launches
