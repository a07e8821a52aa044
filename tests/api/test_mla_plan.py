"""Lengths that plans are made for, and the workspace that a caller is told of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlagen
from mlagen.api import mla_plan
from mlagen.api.mla_plan import plan_call, rounded_up
from mlagen.errors import ArgumentError
from mlagen.runtime.device import DeviceFacts
from mlagen.spec.arch import Arch


@given(st.integers(min_value=0, max_value=2**31))
def test_a_length_is_rounded_up_by_an_eighth_at_the_most(length: int) -> None:
    """The result is no less, hardly more, and its own result."""
    rounded = rounded_up(length)

    assert length <= rounded <= length * 9 / 8
    assert rounded_up(rounded) == rounded


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let GPU 0 be an H200."""
    facts = DeviceFacts(index=0, name="", major=9, minor=0, sm_count=132, memory_bytes=0)
    monkeypatch.setattr(mla_plan, "arch_of_device", lambda _: Arch(90, "a"))
    monkeypatch.setattr(mla_plan, "device_facts", lambda _: facts)
    plan_call.cache_clear()
    yield
    plan_call.cache_clear()


@pytest.mark.usefixtures("h200")
def test_no_call_needs_more_than_513_kib_for_each_sm() -> None:
    """What the docstring promises holds for small and large batches, short and long."""
    needed = [
        mlagen.workspace_bytes(batch=batch, q_len=1, heads=heads, max_seq_len=max_seq_len)
        for batch in (1, 2, 7, 33, 80, 130, 400)
        for heads in (1, 16, 48, 128, 256)
        for max_seq_len in (1, 700, 5000, 131_072)
    ]

    assert max(needed) > 0
    assert max(needed) <= 132 * 513 * 1024


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says how many there are."""
    monkeypatch.setattr("mlagen.runtime.device.visible_devices", list)

    with pytest.raises(ArgumentError) as caught:
        mlagen.workspace_bytes(batch=1, q_len=1, heads=16, max_seq_len=100, device=77)

    assert str(caught.value) == "device: expected one of 0 visible GPUs, got 77"
