"""Attention decode kernels for NVIDIA GPUs, compiled at the first call and kept on disk.

Importing this package touches no disk, driver or compiler; each name below loads what it needs
when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mlagen.errors import (
    ArgumentError,
    CacheError,
    CaptureError,
    CompileError,
    DriverError,
    MlagenError,
    ToolchainError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from mlagen import mla
    from mlagen.api.mla_plan import workspace_bytes
    from mlagen.prewarming import prewarm

__all__ = [
    "ArgumentError",
    "CacheError",
    "CaptureError",
    "CompileError",
    "DriverError",
    "MlagenError",
    "ToolchainError",
    "UnsupportedError",
    "__version__",
    "mla",
    "prewarm",
    "workspace_bytes",
]

__version__ = "0.1.0"

_MODULES = {"prewarm": "mlagen.prewarming", "workspace_bytes": "mlagen.api.mla_plan"}


def __getattr__(name: str) -> object:
    if name == "mla":
        return import_module("mlagen.mla")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'mlagen' has no attribute {name!r}")
