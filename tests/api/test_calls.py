"""Lengths that plans are made for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlagen.api.calls import rounded_up


@given(st.integers(min_value=0, max_value=2**31))
def test_a_length_is_rounded_up_by_an_eighth_at_the_most(length: int) -> None:
    """The result is no less, hardly more, and its own result."""
    rounded = rounded_up(length)

    assert length <= rounded <= length * 9 / 8
    assert rounded_up(rounded) == rounded
