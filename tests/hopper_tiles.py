"""Which kernels and tiles calls take on Hopper, as tests want it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlagen.api import gqa_call, gqa_plan, mla_call, mla_plan
from mlagen.runtime import plan_mla_sm90
from mlagen.runtime.plan import GqaProblemShape
from mlagen.settings import current_settings
from mlagen.spec.gqa_sm90 import GqaSm90Spec


@contextmanager
def taking_smaller_tiles(monkeypatch: pytest.MonkeyPatch, *, are_taken: bool) -> Iterator[None]:
    """Have calls take tiles of fewer rows where there is little to do, or never."""
    monkeypatch.setattr(plan_mla_sm90, "TAKES_SMALLER_TILES", are_taken)
    _forget()
    yield
    _forget()


@contextmanager
def taking_hopper_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have every call take a kernel for Hopper, and the tile for its rows."""
    monkeypatch.setenv("MLAGEN_MLA_KERNEL", "sm90")
    current_settings.cache_clear()
    with taking_smaller_tiles(monkeypatch, are_taken=False):
        yield


@contextmanager
def taking_heads_together(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have blocks of grouped-query calls take as many kv heads as there are kernels for."""

    def max_heads(spec: GqaSm90Spec, problem: GqaProblemShape, _: int) -> int:
        return math.gcd(problem.kv_heads, spec.max_heads)

    monkeypatch.setattr(gqa_plan, "heads_of_block", max_heads)
    _forget_gqa()
    yield
    _forget_gqa()


def _forget_gqa() -> None:
    gqa_plan.plan_gqa_sm90_call.cache_clear()
    gqa_call._calls.clear()


def _forget() -> None:
    mla_plan.plan_mla_sm90_call.cache_clear()
    mla_call._calls.clear()
