"""Isolated prewarms, with workers replaced by ones that crash or hang."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import mlagen
from mlagen.prewarming import isolation
from mlagen.prewarming.isolation import worker_command
from mlagen.prewarming.report import PrewarmUnit
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import KernelSpec
from tests.kernels import COMBINE, SM_80

OTHER = CombineSpec(arch=SM_80, dtype=DType.FP16, head_dim_vo=512)
FOREVER = "import time; time.sleep(600)"


def replace_worker(
    monkeypatch: pytest.MonkeyPatch, code: str, *, of: KernelSpec | None = COMBINE
) -> None:
    """Replace the worker of one kernel, or of all, by this code."""

    def command(spec: KernelSpec) -> list[str]:
        is_replaced = of is None or spec == of
        if is_replaced:
            return [sys.executable, "-c", code, str(spec), *sys.path]
        return worker_command(spec)

    monkeypatch.setattr(isolation, "worker_command", command)


def prewarm(*specs: KernelSpec, **options: Any) -> dict[KernelSpec, PrewarmUnit]:
    """Return the units of an isolated prewarm."""
    report = mlagen.prewarm(kernels=specs, isolate=True, **options)
    return {unit.spec: unit for unit in report.units}
