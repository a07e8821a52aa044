"""Which kernels and tiles calls take on Hopper, as tests want it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlagen.api import mla_call, mla_plan
from mlagen.runtime import plan_hopper
from mlagen.settings import current_settings


@contextmanager
def taking_smaller_tiles(monkeypatch: pytest.MonkeyPatch, *, are_taken: bool) -> Iterator[None]:
    """Have calls take tiles of fewer rows where there is little to do, or never."""
    monkeypatch.setattr(plan_hopper, "TAKES_SMALLER_TILES", are_taken)
    _forget()
    yield
    _forget()


@contextmanager
def taking_hopper_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have every call take a kernel for Hopper, and the tile for its rows."""
    monkeypatch.setenv("MLAGEN_MLA_KERNEL", "hopper")
    current_settings.cache_clear()
    with taking_smaller_tiles(monkeypatch, are_taken=False):
        yield


def _forget() -> None:
    mla_plan.plan_hopper_call.cache_clear()
    mla_call._calls.clear()
