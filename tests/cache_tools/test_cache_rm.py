"""`mlagen cache rm`: removes the named kernels, and no others."""

from __future__ import annotations

import json

from mlagen.cache.default_store import kernel_store
from mlagen.prewarming import PrewarmReport

from .conftest import Run


def remaining_keys() -> list[str]:
    """Return the keys in the cache."""
    return [stored.key for stored in kernel_store().entries()]


def test_a_named_kernel_is_removed(run: Run, cached: PrewarmReport) -> None:
    """The other kernels stay."""
    gone, kept = cached.units

    result = run("cache", "rm", gone.key[:8])

    assert result.exit_code == 0
    assert result.stdout.startswith(f"removed {gone.key[:8]} by {gone.toolchain}, ")
    assert remaining_keys() == [kept.key]


def test_one_bad_key_removes_nothing(run: Run, cached: PrewarmReport) -> None:
    """All keys are looked up before the first is removed."""
    result = run("cache", "rm", cached.units[0].key, "123456")

    assert (result.exit_code, result.stdout) == (2, "")
    assert len(remaining_keys()) == 2


def test_a_key_given_twice_is_removed_once(run: Run, cached: PrewarmReport) -> None:
    """The document lists each removed entry once; the text is on stderr."""
    key = cached.units[0].key

    result = run("cache", "rm", key, key[:6], "--json")

    assert [entry["key"] for entry in json.loads(result.stdout)["removed"]] == [key]
    assert len(result.stderr.splitlines()) == 1


def test_no_key_is_bad_usage(run: Run) -> None:
    """A key is required."""
    result = run("cache", "rm")

    assert result.exit_code == 2
