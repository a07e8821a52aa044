"""The store that the settings name; light enough for commands that only look."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from mlagen.cache.store import KernelStore
from mlagen.fork_safety import in_one_piece
from mlagen.paths import folder_problem
from mlagen.settings import Settings, current_settings

# The entry points of packages that ship kernels: each names the package that is a cache folder.
PACKAGES = "mlagen.kernels"

_logger = logging.getLogger("mlagen")

_stores: dict[Settings, KernelStore] = {}


def kernel_store() -> KernelStore:
    """Return the store that the settings name; nothing is created."""
    settings = current_settings()
    # Of threads that ask first and together, all get one and the same, and share its flights.
    return _stores.get(settings) or _stores.setdefault(settings, _store_of(settings))


@cache
def packaged_layers() -> Sequence[Path]:
    """Return the cache folders that installed packages ship; no package is imported."""
    layers = []
    try:
        with in_one_piece():  # what reads metadata is imported when it does
            points = sorted(metadata.entry_points(group=PACKAGES))
        for point in points:
            files = point.dist.files if point.dist else ()
            place = (point.value, "v1")
            first = next((file for file in files or () if file.parts[:2] == place), None)
            if first is not None:
                layers.append(Path(str(first.locate())).parents[len(first.parts) - 2])
    except (LookupError, OSError, TypeError, ValueError) as error:
        # Any package may have broken them, kernels or not: they are read together.
        message = "%s: expected readable metadata of all packages, got %r, passing kernels by"
        _logger.warning(message, PACKAGES, error)
    return _readable(PACKAGES, layers)


def _readable(name: str, layers: Sequence[Path]) -> tuple[Path, ...]:
    """Return the layers that can be asked, with a warning for each that cannot.

    A layer that is not there yet may come; one that fails is not asked again for each kernel, since
    a server that is gone may take long to say so.
    """
    problems = {layer: folder_problem(layer) for layer in layers}
    for layer, problem in problems.items():
        if problem:
            _logger.warning(
                "%s: expected a folder, got %s, passing it by: %s", name, problem, layer
            )
    return tuple(layer for layer, problem in problems.items() if problem in (None, "none"))


def _store_of(settings: Settings) -> KernelStore:
    return KernelStore(
        settings.cache_dir,
        lock_dir=settings.lock_dir,
        lock_timeout_s=settings.lock_timeout_s,
        layers=_readable("MLAGEN_CACHE_RO", settings.cache_layers),
        packaged=packaged_layers,
        is_shared=settings.trusts_shared,
        max_bytes=settings.cache_max_bytes,
    )
