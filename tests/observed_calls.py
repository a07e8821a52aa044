"""Calls of entry points that are logged and dumped, as in a process that requests it."""

from __future__ import annotations

import json
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from mlagen.decode import BatchDecodeWithPagedKVCacheWrapper
from mlagen.mla import BatchMLAPagedAttentionWrapper, flare_mla_decoding
from mlagen.observe import observed
from mlagen.settings import current_settings
from tests import odd_calls
from tests.odd_calls import ENTRY_CALLS as BUILDERS
from tests.odd_calls import Call

__all__ = ["BUILDERS", "built", "dumps_in", "observe"]


def observe(monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
    """Set variables, and wrap the wrapper's methods and what :mod:`tests.odd_calls` calls."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    current_settings.cache_clear()
    observed.dumper.cache_clear()
    observed._warn_of_kind.cache_clear()
    for name in observed.METHODS:
        for wrapper in (BatchMLAPagedAttentionWrapper, BatchDecodeWithPagedKVCacheWrapper):
            monkeypatch.setattr(wrapper, name, observed.observed(getattr(wrapper, name)))
    decode = observed.observed(flare_mla_decoding)
    monkeypatch.setattr(odd_calls, "flare_mla_decoding", decode)


def built(name: str) -> Call:
    """Return a call of :data:`BUILDERS`, observed."""
    function, arguments = BUILDERS[name]()
    is_entry = isinstance(function, FunctionType) and function.__module__.startswith("mlagen.")
    if is_entry and function.__code__.co_filename != observed.__file__:
        function = observed.observed(function)
    return function, arguments


def dumps_in(folder: Path) -> list[dict[str, Any]]:
    """Return the dumps of a folder in the order of their calls."""
    paths = sorted(folder.glob("*.json"), key=lambda path: path.stem[-4:])
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]
