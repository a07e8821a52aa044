"""Valid arguments of MLA decode with one change that must be rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

import mlagen
from mlagen.errors import ArgumentError
from mlagen.families.mla.dispatch import run_mla
from tests.problems.mla import MlaCase, MlaProblem

UNIFORM = MlaCase(name="", seq_lens=(70, 3), q_len=2, heads=16)
SINGLE = MlaCase(name="", seq_lens=(70, 3), heads=16)
RAGGED = MlaCase(name="", seq_lens=(70, 3), q_lens=(1, 4), heads=16)
SEPARATE_ROPE = replace(UNIFORM, separate_rope=True)
E4M3_QUERY = replace(UNIFORM, dtype=torch.float8_e4m3fn)
FLAT = replace(UNIFORM, flat_tables=True)
OTHER_CACHE = replace(UNIFORM, values="other cache")
OTHER_PAGES = replace(UNIFORM, values="other pages")
FP8_PER_TOKEN = replace(E4M3_QUERY, kv_format="fp8_per_token")
FP8_DS_MLA = replace(UNIFORM, kv_format="fp8_ds_mla")
SCALED = replace(UNIFORM, kv_format="e4m3", scales="for 128 elements")
SPARSE = replace(UNIFORM, top_k=70)
SPARSE_RAGGED = replace(RAGGED, top_k=70)


class Rejection(NamedTuple):
    """A change of valid arguments, and the message of its rejection."""

    name: str
    change: Callable[[MlaProblem], dict[str, Any]]
    message: str
    case: MlaCase = UNIFORM


def rejections(*cases: Rejection) -> pytest.MarkDecorator:
    """Return the parametrisation of a test by rejections."""
    return pytest.mark.parametrize("rejection", cases, ids=lambda rejection: rejection.name)


def check(rejection: Rejection) -> None:
    """Check that the call is rejected with the message, and does not write its outputs."""
    problem = rejection.case.build("cpu")
    valid = problem.arguments(**_outputs(problem))
    arguments = valid | rejection.change(problem)

    def call() -> object:
        return mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)

    _check(call, rejection.message, valid)


def check_inputs(rejection: Rejection) -> None:
    """Check the same for a change of :class:`MlaArgs`, with its field names."""
    problem = rejection.case.build("cpu")
    valid = problem.inputs(**_outputs(problem))
    inputs = valid._replace(**rejection.change(problem))

    _check(lambda: run_mla(inputs, enable_pdl=True), rejection.message, valid._asdict())


def _outputs(problem: MlaProblem) -> dict[str, Any]:
    shape = problem.query.shape[:-1]
    return {
        "out": torch.full((*shape, 512), 7.0, dtype=torch.bfloat16),
        "lse": torch.full(shape, 7.0),
        "return_lse": True,
        "workspace_buffer": torch.full((64,), 7.0),
    }


def _check(call: Callable[[], object], message: str, valid: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()

    assert str(caught.value) == message
    written = [name for name in ("out", "lse", "workspace_buffer") if (valid[name] != 7.0).any()]
    assert written == []


def strided(tensor: torch.Tensor, gap: int = 2) -> torch.Tensor:
    """Return a copy with stride ``gap`` in the last dimension."""
    spread = torch.zeros(*tensor.shape, gap, dtype=tensor.dtype)
    spread[..., 0] = tensor
    return spread[..., 0]


def padded(tensor: torch.Tensor, extra: int, *, dim: int = -1) -> torch.Tensor:
    """Return a copy in memory with ``extra`` elements of padding along a dimension."""
    shape = list(tensor.shape)
    shape[dim] += extra
    return torch.zeros(shape, dtype=tensor.dtype).narrow(dim, 0, tensor.shape[dim]).copy_(tensor)


def displaced(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose base address is one element after an aligned one."""
    memory = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)
