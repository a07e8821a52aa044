"""The default store, made from the settings; importing it is cheap enough for `mlagen cache`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from mlagen.cache.store import KernelStore
from mlagen.fork_safety import defer_forks
from mlagen.paths import folder_problem
from mlagen.settings import Settings, current_settings

# Entry-point group of packages that ship kernels; each entry point names such a package.
ENTRY_POINT_GROUP = "mlagen.kernels"

_logger = logging.getLogger("mlagen")

_stores: dict[Settings, KernelStore] = {}


def kernel_store() -> KernelStore:
    """Return the store of the current settings; creates nothing on disk."""
    settings = current_settings()
    # `setdefault`: concurrent first callers get the same store, and share its single flight.
    return _stores.get(settings) or _stores.setdefault(settings, _store_of(settings))


@cache
def packaged_layers() -> Sequence[Path]:
    """Return the cache folders of installed packages without importing them."""
    layers = []
    try:
        with defer_forks():  # importlib.metadata imports lazily
            points = sorted(metadata.entry_points(group=ENTRY_POINT_GROUP))
        for point in points:
            files = point.dist.files if point.dist else ()
            place = (point.value, "v1")
            first = next((file for file in files or () if file.parts[:2] == place), None)
            if first is not None:
                layers.append(Path(str(first.locate())).parents[len(first.parts) - 2])
    except (LookupError, OSError, TypeError, ValueError) as error:
        # All packages are read together, so any of them may have broken metadata.
        message = "%s: expected readable metadata of all packages, got %r, ignoring their kernels"
        _logger.warning(message, ENTRY_POINT_GROUP, error)
    return _usable_layers(ENTRY_POINT_GROUP, layers)


def _usable_layers(name: str, layers: Sequence[Path]) -> tuple[Path, ...]:
    """Return the usable layers, and warn of each other one.

    A missing layer may appear later. One that fails is dropped instead of retried for each kernel,
    since an unreachable server may take long to fail.
    """
    problems = {layer: folder_problem(layer) for layer in layers}
    for layer, problem in problems.items():
        if problem:
            _logger.warning("%s: expected a folder, got %s, ignoring it: %s", name, problem, layer)
    return tuple(layer for layer, problem in problems.items() if problem in (None, "none"))


def _store_of(settings: Settings) -> KernelStore:
    return KernelStore(
        settings.cache_dir,
        lock_dir=settings.lock_dir,
        lock_timeout_s=settings.lock_timeout_s,
        layers=_usable_layers("MLAGEN_CACHE_RO", settings.cache_layers),
        packaged=packaged_layers,
        is_shared=settings.trusts_shared,
        max_bytes=settings.cache_max_bytes,
    )
