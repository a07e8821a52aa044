"""Fixtures that force kernels and tiles on an sm90 GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from mlagen.families.common.dispatch import Dispatcher
from mlagen.families.common.launchers import Launcher
from mlagen.families.common.problem import ProblemShape
from mlagen.families.dispatch import GQA, MLA
from mlagen.families.gqa import plan as gqa_plan
from mlagen.families.mla import plan as mla_plan
from mlagen.families.mla.plan import choose_block_m
from mlagen.settings import current_settings
from mlagen.spec.gqa.sm90 import GqaSm90Spec

IS_SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_sm90 = pytest.mark.skipif(not IS_SM90, reason="needs an sm_90 GPU")


def launchers_of(calls: Dispatcher) -> list[Launcher]:
    """Return the launchers of the calls that are cached."""
    return [each.launcher for entries in calls._guarded.values() for each in entries]


@contextmanager
def smaller_tiles(monkeypatch: pytest.MonkeyPatch, *, enabled: bool) -> Iterator[None]:
    """Enable or disable the smaller tiles of calls with little work."""
    choose = choose_block_m if enabled else lambda spec, *_: spec.block_m
    monkeypatch.setattr(mla_plan, "choose_block_m", choose)
    _clear_mla_caches()
    yield
    _clear_mla_caches()


def choose_kernel(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Make calls of both families use a kind of kernel: "sm80", "sm90" or "auto"."""
    for name in ("MLAGEN_MLA_KERNEL", "MLAGEN_GQA_KERNEL"):
        monkeypatch.setenv(name, kernel)
    current_settings.cache_clear()


@contextmanager
def sm90_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make every call use an sm90 kernel with its default tile."""
    choose_kernel(monkeypatch, "sm90")
    with smaller_tiles(monkeypatch, enabled=False):
        yield


@contextmanager
def max_kv_heads_per_cta(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make CTAs of GQA calls process the max number of KV heads."""

    def max_heads(spec: GqaSm90Spec, problem: ProblemShape, _: int) -> int:
        return math.gcd(problem.kv_heads, spec.max_kv_heads_per_cta)

    monkeypatch.setattr(gqa_plan, "choose_kv_heads_per_cta", max_heads)
    _clear_gqa_caches()
    yield
    _clear_gqa_caches()


def _clear_gqa_caches() -> None:
    gqa_plan.plan_gqa_sm90_call.cache_clear()
    GQA.clear()


def _clear_mla_caches() -> None:
    mla_plan.plan_mla_sm90_call.cache_clear()
    MLA.clear()
