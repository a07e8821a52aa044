"""Calls of entry points that are logged and dumped, as in a process that requests it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlagen.observe import observed
from mlagen.settings import current_settings
from tests.odd_calls import ENTRY_CALLS as BUILDERS
from tests.odd_calls import Call

__all__ = ["BUILDERS", "built", "dumps_in", "observe"]


def observe(monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
    """Set variables, which calls and new wrappers read."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    current_settings.cache_clear()
    observed.dumper.cache_clear()
    observed._warn_of_kind.cache_clear()


def built(name: str) -> Call:
    """Return a call of :data:`BUILDERS`."""
    return BUILDERS[name]()


def dumps_in(folder: Path) -> list[dict[str, Any]]:
    """Return the dumps of a folder in the order of their calls."""
    paths = sorted(folder.glob("*.json"), key=lambda path: path.stem[-4:])
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]
