"""JIT-compiled attention decode kernels for NVIDIA GPUs, with an on-disk cache.

Importing this package accesses no disk, driver or compiler; each name below loads its
dependencies at its first use.
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
    MissError,
    MlagenError,
    ToolchainError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from mlagen import cascade, decode, distributed, mla, msa_ops, ops, sparse, writers, xqa
    from mlagen.families.workspace import max_workspace_bytes, workspace_bytes
    from mlagen.jit import freeze, on_compile
    from mlagen.mla.flare import PagedKVCache
    from mlagen.monitoring import metrics
    from mlagen.prewarming import prewarm

__all__ = [
    "ArgumentError",
    "CacheError",
    "CaptureError",
    "CompileError",
    "DriverError",
    "MissError",
    "MlagenError",
    "PagedKVCache",
    "ToolchainError",
    "UnsupportedError",
    "__version__",
    "cascade",
    "decode",
    "distributed",
    "freeze",
    "max_workspace_bytes",
    "metrics",
    "mla",
    "msa_ops",
    "on_compile",
    "ops",
    "prewarm",
    "sparse",
    "workspace_bytes",
    "writers",
    "xqa",
]

__version__ = "0.1.0"

_API_MODULES = (
    *("cascade", "decode", "distributed", "mla", "msa_ops", "ops", "sparse", "writers", "xqa"),
)
_MODULES = {
    "PagedKVCache": "mlagen.mla.flare",
    "max_workspace_bytes": "mlagen.families.workspace",
    "metrics": "mlagen.monitoring",
    "freeze": "mlagen.jit",
    "on_compile": "mlagen.jit",
    "prewarm": "mlagen.prewarming",
    "workspace_bytes": "mlagen.families.workspace",
}


def __getattr__(name: str) -> object:
    if name in _API_MODULES:
        return import_module(f"mlagen.{name}")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'mlagen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
