"""Baselines of `mlagen bench --compare`: libraries that are installed, or lie in a folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from mlagen.errors import ArgumentError, UnsupportedError

from ..suites import LIBRARIES
from . import fa3, flashinfer, flashmla, hpc, triton
from .baseline import Baseline

_MODULES = dict(zip(LIBRARIES, (flashinfer, flashmla, fa3, hpc, triton), strict=True))


def find_baselines(libraries: Iterable[str], folder: Path | None = None) -> list[Baseline]:
    """Return the baselines of the named libraries; FlashMLA is one for each wheel that has it.

    Without names of :data:`~..suites.LIBRARIES`, those of all that are found. ``folder`` is what
    ``pip install --target`` filled; it comes before the installed packages. Raises ArgumentError if
    it is none; UnsupportedError if a named library is not found, or none is.
    """
    wanted = list(dict.fromkeys(libraries))
    if folder is not None:
        if not folder.is_dir():
            raise ArgumentError(f"libraries: expected a folder of packages, got {folder}")
        sys.path.insert(0, os.fspath(folder.resolve()))
    found = []
    for name in wanted or LIBRARIES:
        library = _MODULES[name]
        baselines = library.find()
        if wanted and not baselines:
            raise UnsupportedError(
                f"compare: expected {library.PACKAGES} for {name}, got none; "
                f"run: {library.INSTALL}, or omit {name}"
            )
        found += baselines
    if not found:
        raise UnsupportedError(
            f"compare: expected one of {', '.join(LIBRARIES)} to be installed, got none; "
            f"run: {flashmla.INSTALL}, or omit --compare"
        )
    return found
