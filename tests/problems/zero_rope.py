"""MLA calls without rope, beside the same calls of a query whose rope part is zero."""

from __future__ import annotations

from typing import Any

import torch

from tests.problems.mla import MlaProblem

_E4M3_TOLERANCE = 2**-4  # of outputs and LSE of about 1


def latent_part(problem: MlaProblem) -> dict[str, Any]:
    """Return the arguments that leave the rope part of a problem out: views of its tensors."""
    rank = problem.case.kv_lora_rank
    query, kv_cache = problem.query[..., :rank], problem.kv_cache[..., :rank]
    return {"query": query, "kv_cache": kv_cache, "qk_rope_head_dim": 0}


def assert_zero_rope_changes_nothing(
    kind: str, result: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, ...]
) -> None:
    """Fail unless output and LSE are those of the zero rope part: of 16 bits, in every bit."""
    for ours, theirs in zip(result, expected, strict=True):
        atol = _E4M3_TOLERANCE if kind == "e4m3" else 0.0
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=atol)
