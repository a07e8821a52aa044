"""Valid arguments of grouped-query decode with one change that must be rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import mlagen.decode
import mlagen.xqa
from mlagen.errors import ArgumentError
from tests.problems.entry_points import xqa_arguments
from tests.problems.gqa import GqaCase

UNIFORM = GqaCase(name="", seq_lens=(70, 3), q_len=2, mask="random")
SINGLE = GqaCase(name="", seq_lens=(70, 3))
RAGGED = GqaCase(name="", seq_lens=(70, 3), q_lens=(1, 4), mask="random")
STACKED = GqaCase(name="", seq_lens=(70, 3), cache_layout="stacked")
E4M3_KV = GqaCase(name="", seq_lens=(70, 3), kv="e4m3")
NVFP4 = GqaCase(name="", seq_lens=(70, 3), kv="nvfp4")
NVFP4_STACKED = GqaCase(name="", seq_lens=(70, 3), kv="nvfp4", cache_layout="stacked")


class Rejection(NamedTuple):
    """A change of valid arguments, and the message of its rejection."""

    name: str
    change: Callable[[Any], dict[str, Any]]  # of a GqaProblem
    message: str
    case: GqaCase = SINGLE


def rejections(*cases: Rejection) -> pytest.MarkDecorator:
    """Return the parametrisation of a test by rejections."""
    return pytest.mark.parametrize("rejection", cases, ids=lambda rejection: rejection.name)


def check(rejection: Rejection) -> None:
    """Check that the call is rejected with the message, and does not write its outputs."""
    problem = rejection.case.build("cpu")
    valid = problem.arguments(
        out=torch.full(problem.query.shape, 7.0, dtype=torch.bfloat16),
        workspace_buffer=torch.full((64,), 7.0),
    )
    arguments = valid | rejection.change(problem)

    with pytest.raises(ArgumentError) as caught:
        mlagen.decode.xqa_batch_decode_with_kv_cache(**arguments)

    assert str(caught.value) == rejection.message
    assert [name for name in ("out", "workspace_buffer") if (valid[name] != 7.0).any()] == []


def check_xqa(rejection: Rejection) -> None:
    """Check the same for ``xqa``."""
    problem = rejection.case.build("cpu")
    valid = xqa_arguments(problem, workspace_buffer=torch.full((64,), 7.0))
    valid["output"].fill_(7.0)
    arguments = valid | rejection.change(problem)

    with pytest.raises(ArgumentError) as caught:
        mlagen.xqa.xqa(**arguments)

    assert str(caught.value) == rejection.message
    assert [name for name in ("output", "workspace_buffer") if (valid[name] != 7.0).any()] == []
