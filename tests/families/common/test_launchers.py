"""Rounded lengths, and the scratch of a call in its workspace."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlagen.errors import ArgumentError
from mlagen.families.common.launchers import rounded_up, scratch_offset


@given(st.integers(min_value=0, max_value=2**31))
def test_a_length_is_rounded_up_by_at_most_an_eighth(length: int) -> None:
    """Rounding never decreases a length, adds at most an eighth, and is idempotent."""
    rounded = rounded_up(length)

    assert length <= rounded <= length * 9 / 8
    assert rounded_up(rounded) == rounded


@given(st.integers(0, 5000), st.integers(0, 5000), st.sampled_from([torch.uint8, torch.float32]))
def test_scratch_is_the_end_of_a_workspace(more: int, needed: int, dtype: torch.dtype) -> None:
    """Scratch is the last aligned range of the workspace, and never outside."""
    workspace = torch.empty(-(-needed // dtype.itemsize) + more, dtype=dtype)

    begin = scratch_offset(workspace, "x", needed)

    assert begin % 128 == 0
    assert 0 <= begin <= workspace.nbytes - needed < begin + 128


def test_a_workspace_that_is_too_small_is_rejected() -> None:
    """The message names both sizes."""
    with pytest.raises(ArgumentError, match="x: expected 9 bytes or more for this call, got 8"):
        scratch_offset(torch.empty(2), "x", 9)
