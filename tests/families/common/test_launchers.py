"""Lengths of a call, and its scratch in the workspace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlagen.errors import ArgumentError
from mlagen.families.common.launchers import (
    Address,
    joined,
    rounded_up,
    scratch_offset,
)
from mlagen.families.common.xqa_arguments import table_capacity
from mlagen.families.mla import launch as mla_launch
from mlagen.mla.xqa import flat_lengths
from tests.families.launches import Launches, args_of, launched
from tests.fixture_types import Patch
from tests.problems.mla import MlaCase


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


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_lengths_are_flattened_without_a_copy(shape: tuple[int, ...]) -> None:
    """The trailing axis of size 1 is dropped as a view, so a CUDA graph reads new lengths."""
    lengths = torch.tensor([3, 4], dtype=torch.int32).view(shape)

    flat = flat_lengths(lengths)

    assert flat.tolist() == [3, 4]
    assert flat.data_ptr() == lengths.data_ptr()


def test_the_capacity_of_a_table() -> None:
    """The capacity is columns times page size, clamped to 32 bits."""
    wide = torch.zeros(1, 1).expand(1, 2**29)

    assert table_capacity(torch.zeros(2, 5), 16) == 80
    assert table_capacity(wide, 16) == 2**31 - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quer": Address("query")}, "quer: expected a parameter of a kernel, got another name"),
        ({"sinks": None}, "sinks: expected a source of this kernel parameter, got none"),
        ({"heads": 16}, "heads: expected one source of a kernel parameter, got two"),
    ],
)
@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_the_sources_of_kernel_parameters(
    changes: dict[str, Any], message: str, kernel: str, launches: Launches, monkeypatch: Patch
) -> None:
    """A misspelt, a missing or a doubly defined parameter is an error of the launcher."""
    sources = {**mla_launch._SOURCES, **changes}
    kept = {name: source for name, source in sources.items() if source is not None}
    monkeypatch.setattr(mla_launch, "_SOURCES", kept)

    with pytest.raises(ValueError, match=f"^{message}$"):
        launched(args_of(MlaCase(seq_lens=(70,))), launches, kernel)


def test_parts_of_sources_are_disjoint() -> None:
    """Two sources of one parameter are an error, whatever they are."""
    with pytest.raises(ValueError, match=r"^lse: expected one source"):
        joined({"lse": 1, "out": 2}, {"lse": 1})
