"""Attention of one query token in float64, as the tests of the servers' plugins expect it."""

from __future__ import annotations

import torch


def attended(
    query: torch.Tensor, rows: torch.Tensor, scale: float, dim_vo: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the natural LSE of ``query [heads, dim]`` over ``rows [tokens, dim]``.

    Without a row, zeros and minus infinity.
    """
    if not len(rows):
        return torch.zeros(len(query), dim_vo).double(), torch.full((len(query),), -torch.inf)
    scores = query.double() @ rows.double().T * scale
    return scores.softmax(-1) @ rows[:, :dim_vo].double(), scores.logsumexp(-1)


def assert_near(got: torch.Tensor | None, want: torch.Tensor) -> None:
    """Require a 16-bit result within its rounding of values of about one."""
    assert got is not None
    torch.testing.assert_close(got.double(), want.double(), atol=2e-2, rtol=2e-2)
