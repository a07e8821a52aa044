"""Entries by key prefix."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from cache_tools.tools.entries import document_of, entries_of, iso_time
from mlagen.cache.default_store import kernel_store
from mlagen.errors import ArgumentError
from mlagen.prewarming import PrewarmReport

from .conftest import Run


@pytest.mark.parametrize("digits", [6, 8, 64])
def test_a_key_prefix_is_enough(digits: int, cached: PrewarmReport) -> None:
    """Six digits or more identify an entry, in upper case too."""
    key = cached.units[0].key

    (found,) = entries_of(kernel_store(), key[:digits].upper())

    assert found.key == key


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (
            "000000",
            "key: expected a prefix of a cached key (mlagen cache ls), got 000000",
        ),
        ("abc", "key: expected 6 to 64 lower-case hex digits, got 'abc'"),
        ("kernel", "key: expected 6 to 64 lower-case hex digits, got 'kernel'"),
    ],
    ids=["nothing begins so", "too short", "no digits"],
)
def test_an_invalid_key_is_rejected(prefix: str, message: str) -> None:
    """The message defines a key."""
    with pytest.raises(ArgumentError) as raised:
        entries_of(kernel_store(), prefix)

    assert str(raised.value) == message


def test_an_ambiguous_prefix_is_rejected(
    cached: PrewarmReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has enough digits of each key to distinguish them."""
    store = kernel_store()
    everything = list(store.entries())
    monkeypatch.setattr(store, "select", lambda _prefix: everything)

    with pytest.raises(ArgumentError) as raised:
        entries_of(store, "abcdef")

    keys = ", ".join(sorted(unit.key[:10] for unit in cached.units))
    assert str(raised.value) == f"key: expected more digits than abcdef, got several keys: {keys}"


def test_the_document_of_a_damaged_entry_has_the_problem(cached: PrewarmReport) -> None:
    """An entry without a manifest has its path and its problem."""
    (stored,) = entries_of(kernel_store(), cached.units[0].key)
    (stored.path / "manifest.json").write_text("{")
    (stored,) = entries_of(kernel_store(), cached.units[0].key)

    document = document_of(stored)

    assert document["problem"].startswith("manifest.json: expected a manifest, got ")
    assert [name for name, value in document.items() if value is not None] == [
        *("key", "toolchain", "path", "layer", "is_read_only", "size_bytes", "used", "problem")
    ]


@pytest.mark.parametrize("seconds", [-(2.0**40), 2.0**40, -1e300, 1e300, float("inf"), 0.0])
def test_a_time_that_is_no_date_is_none(seconds: float) -> None:
    """A file system stores any number as a time."""
    assert iso_time(seconds) is None


@pytest.mark.parametrize("seconds", [-(2**40), -(2**34), 2**34])
def test_entries_of_any_time_are_listed(
    seconds: int, run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """An invalid time in a manifest stops no command."""
    key = cached.units[0].key
    for manifest in cache_dir.rglob("manifest.json"):
        os.utime(manifest, (seconds, seconds))

    for command in (("ls",), ("ls", "--sort", "age"), ("show", key), ("stats",), ("verify",)):
        for option in ((), ("--json",)):
            assert run("cache", *command, *option).exit_code == 0
    assert run("cache", "prune", "--older-than", "1d", "--dry-run").exit_code == 0


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_compile_time_that_is_not_finite_is_damage(
    value: str, cached: PrewarmReport, cache_dir: Path, run: Run
) -> None:
    """JSON has no such numbers, so none is printed."""
    manifest = next(cache_dir.rglob("manifest.json"))
    text = manifest.read_text()
    manifest.write_text(re.sub(r'"compile_ms": [^,}]+', f'"compile_ms": {value}', text))

    listed = json.loads(run("cache", "ls", "--json").stdout, parse_constant=pytest.fail)

    assert cached.units
    assert sum(entry["problem"] is not None for entry in listed["entries"]) == 1
