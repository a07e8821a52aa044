"""Prewarming: compiles kernels, and optionally loads them, before the first call."""

from __future__ import annotations

from mlagen.prewarming.machine import visible_archs
from mlagen.prewarming.report import PrewarmEvent, PrewarmReport, PrewarmUnit
from mlagen.prewarming.run import prewarm

__all__ = ["PrewarmEvent", "PrewarmReport", "PrewarmUnit", "prewarm", "visible_archs"]
