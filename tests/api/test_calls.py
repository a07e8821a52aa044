"""Lengths that plans are made for, and the part of a workspace that a call uses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlagen.api.calls import rounded_up, scratch_offset
from mlagen.errors import ArgumentError


@given(st.integers(min_value=0, max_value=2**31))
def test_a_length_is_rounded_up_by_an_eighth_at_the_most(length: int) -> None:
    """The result is no less, hardly more, and its own result."""
    rounded = rounded_up(length)

    assert length <= rounded <= length * 9 / 8
    assert rounded_up(rounded) == rounded


@given(st.integers(0, 5000), st.integers(0, 5000), st.sampled_from([torch.uint8, torch.float32]))
def test_scratch_is_the_end_of_a_workspace(more: int, needed: int, dtype: torch.dtype) -> None:
    """Aligned like the workspace, as far back as that allows, and never outside."""
    workspace = torch.empty(-(-needed // dtype.itemsize) + more, dtype=dtype)

    begin = scratch_offset(workspace, "x", needed)

    assert begin % 128 == 0
    assert 0 <= begin <= workspace.nbytes - needed < begin + 128


def test_a_workspace_that_is_too_small_is_rejected() -> None:
    """The message has both sizes."""
    with pytest.raises(ArgumentError, match="x: expected 9 bytes or more for this call, got 8"):
        scratch_offset(torch.empty(2), "x", 9)
