"""Conversion of the arguments of ``flashinfer.xqa``'s entry points."""

from __future__ import annotations

import pytest
import torch

from mlagen.families.common.xqa_arguments import flat_lengths, table_capacity


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
