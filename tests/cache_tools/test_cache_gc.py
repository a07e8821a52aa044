"""`mlagen cache gc`: garbage collection and eviction, and nothing else."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from mlagen.prewarming import PrewarmReport
from mlagen.settings import current_settings

from .altered import folder_of, snapshot, use
from .conftest import Run


def test_a_clean_cache_is_unchanged(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """Below the size limit no kernel is evicted."""
    before = snapshot(cache_dir / "v1" / "e")

    result = run("cache", "gc")

    assert len(cached.units) == 2
    assert result.exit_code == 0
    assert result.stdout == (
        f"deleted 0 abandoned folders, 0 in quarantine, 0 kernels of 0 B, from {cache_dir}\n"
    )
    assert snapshot(cache_dir / "v1" / "e") == before


def test_abandoned_folders_are_deleted(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """The folder of a live process stays."""
    staging = cache_dir / "v1" / "staging"
    dead, alive = (staging / f"{name}.elsewhere.1.abcdef01" for name in ("dead", "alive"))
    for folder in (dead, alive):
        folder.mkdir(parents=True)
    os.utime(dead, (time.time() - 7200,) * 2)

    result = run("cache", "gc")

    assert len(cached.units) == 2
    assert result.stdout.startswith("deleted 1 abandoned folder, ")
    assert list(staging.iterdir()) == [alive]


def test_the_quarantine_keeps_the_newest(run: Run, cache_dir: Path) -> None:
    """Quarantined kernels beyond the newest twenty are deleted."""
    quarantine = cache_dir / "v1" / "quarantine"
    for moment in range(100, 125):
        (quarantine / f"{'0' * 64}.{moment}.1").mkdir(parents=True)

    document = json.loads(run("cache", "gc", "--json").stdout)

    assert document["quarantined"] == 5
    assert min(int(cell.name.split(".")[1]) for cell in quarantine.iterdir()) == 105


def test_the_least_recently_used_are_evicted_above_the_limit(
    run: Run, cached: PrewarmReport, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recently used kernel stays, even above the limit."""
    old, young = (folder_of(unit, cache_dir) for unit in cached.units)
    use(old, age_s=7200, now=time.time())
    size = sum(file.stat().st_size for file in old.iterdir())
    monkeypatch.setenv("MLAGEN_CACHE_MAX_SIZE", "1")
    current_settings.cache_clear()

    result = run("cache", "gc", "--json")

    document = json.loads(result.stdout)
    assert [Path(gone["path"]) for gone in document["evicted"]] == [old]
    assert document["freed_bytes"] == size
    assert " 1 kernel of " in result.stderr
    assert (old.exists(), young.exists()) == (False, True)
