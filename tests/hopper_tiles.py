"""Which tiles calls take on Hopper, as tests want it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlagen.api import mla_call, mla_plan
from mlagen.runtime import plan_hopper


@contextmanager
def taking_smaller_tiles(monkeypatch: pytest.MonkeyPatch, *, are_taken: bool) -> Iterator[None]:
    """Have calls take tiles of fewer rows where there is little to do, or never."""
    monkeypatch.setattr(plan_hopper, "TAKES_SMALLER_TILES", are_taken)
    _forget()
    yield
    _forget()


def _forget() -> None:
    mla_plan.plan_hopper_call.cache_clear()
    mla_call._calls.clear()
