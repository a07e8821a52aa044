"""Sound arguments of MLA decode with one change that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import mlagen
from mlagen.errors import ArgumentError
from tests.cases import MlaCase, MlaProblem

UNIFORM = MlaCase(name="", seq_lens=(70, 3), q_len=2, heads=16)
SINGLE = MlaCase(name="", seq_lens=(70, 3), heads=16)
RAGGED = MlaCase(name="", seq_lens=(70, 3), q_lens=(1, 4), heads=16)


class Refusal(NamedTuple):
    """A change of sound arguments, and the message it must meet."""

    name: str
    change: Callable[[MlaProblem], dict[str, Any]]
    message: str
    case: MlaCase = UNIFORM


def refusals(*cases: Refusal) -> pytest.MarkDecorator:
    """Return the parametrisation of a test by refusals."""
    return pytest.mark.parametrize("refusal", cases, ids=lambda refusal: refusal.name)


def check(refusal: Refusal) -> None:
    """Make the call, and see that it is refused as told and leaves its outputs alone."""
    problem = refusal.case.build("cpu")
    shape = problem.query.shape[:-1]
    sound = problem.arguments(
        out=torch.full((*shape, 512), 7.0, dtype=torch.bfloat16),
        lse=torch.full(shape, 7.0),
        return_lse=True,
        workspace_buffer=torch.full((64,), 7.0),
    )
    arguments = sound | refusal.change(problem)

    with pytest.raises(ArgumentError) as caught:
        mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)

    assert str(caught.value) == refusal.message
    written = [name for name in ("out", "lse", "workspace_buffer") if (sound[name] != 7.0).any()]
    assert written == []


def strided(tensor: torch.Tensor, gap: int = 2) -> torch.Tensor:
    """Return a tensor's elements with ``gap`` between two of its last dimension."""
    spread = torch.zeros(*tensor.shape, gap, dtype=tensor.dtype)
    spread[..., 0] = tensor
    return spread[..., 0]


def padded(tensor: torch.Tensor, extra: int, *, dim: int = -1) -> torch.Tensor:
    """Return a tensor's elements in one that has ``extra`` more along a dimension."""
    shape = list(tensor.shape)
    shape[dim] += extra
    return torch.zeros(shape, dtype=tensor.dtype).narrow(dim, 0, tensor.shape[dim]).copy_(tensor)


def displaced(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in memory that begins one element after an aligned address."""
    memory = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)
