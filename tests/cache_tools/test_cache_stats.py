"""`mlagen cache stats`: statistics of the cache."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from mlagen.prewarming import PrewarmReport
from mlagen.settings import current_settings

from .altered import folder_of, move_to_layer, recast, use
from .conftest import Run, damage


def stats(run: Run) -> dict[str, Any]:
    """Return the document."""
    result = run("cache", "stats", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert isinstance(document, dict)
    return document


def groups_by(document: dict[str, Any], by: str) -> dict[str, int]:
    """Return the number of kernels per group of one criterion."""
    return {group["name"]: group["entries"] for group in document["groups"] if group["by"] == by}


def test_kernels_and_bytes_are_counted(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """The size is that of the files, and the kernels of this installation are usable."""
    document = stats(run)

    files = [path for path in (cache_dir / "v1" / "e").rglob("*") if path.is_file()]
    assert document["entries"] == len(cached.units)
    assert document["size_bytes"] == sum(path.stat().st_size for path in files)
    assert (document["usable"], document["unusable"], document["damaged"]) == (2, 0, 0)
    assert groups_by(document, "family") == {"combine": 2}
    assert groups_by(document, "arch") == {"sm_80": 2}
    assert groups_by(document, "layer") == {str(cache_dir): 2}


def test_unusable_kernels_are_counted_separately(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """Another compiler, other kernel sources and damage each make a kernel unusable here."""
    first, second = cached.units
    folder = folder_of(first, cache_dir)
    recast(folder, toolchain="nvrtc-12.8.1", keeps=True)
    recast(folder, key_fields={"templates": "0" * 64}, keeps=True)
    (folder_of(second, cache_dir) / "manifest.json").write_text("{")

    document = stats(run)

    assert (document["usable"], document["unusable"], document["damaged"]) == (1, 3, 1)
    assert groups_by(document, "toolchain") == {"nvrtc-12.8.1": 1, first.toolchain: 3}


@pytest.mark.parametrize(
    ("limit", "share", "text"),
    [("1M", True, "% of 1.0 MiB"), ("0", False, "no limit")],
    ids=["a limit", "none"],
)
def test_the_size_is_compared_with_the_limit(
    limit: str,
    share: bool,
    text: str,
    run: Run,
    cached: PrewarmReport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The size is a share of MLAGEN_CACHE_MAX_SIZE, if that is a limit."""
    monkeypatch.setenv("MLAGEN_CACHE_MAX_SIZE", limit)
    current_settings.cache_clear()

    document = stats(run)

    expected = document["size_bytes"] / (1 << 20) if share else None
    assert len(cached.units) == 2
    assert document["share_of_max"] == expected
    assert text in run("cache", "stats").stdout


def test_the_first_and_the_last_are_named(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """Oldest and newest are by compile time, longest unused is by last use."""
    first, second = cached.units
    recast(folder_of(first, cache_dir), created={"time": "2020-01-01T00:00:00+00:00"})
    use(folder_of(second, cache_dir), age_s=7200, now=time.time())

    document = stats(run)

    assert document["oldest"] == {"key": first.key, "time": "2020-01-01T00:00:00+00:00"}
    assert document["newest"]["key"] == second.key
    assert document["longest_unused"]["key"] == second.key


def test_quarantine_and_abandoned_folders_are_counted(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """Quarantine and abandoned folders are reported; a folder in use is not abandoned."""
    damage(cached.units[0].key, cached.units[0].toolchain, cache_dir)
    run("cache", "verify", "--quarantine")
    staging = cache_dir / "v1" / "staging"
    for name, age_s in (("old", 7200), ("current", 0)):
        folder = staging / f"{name}.elsewhere.1.abcdef01"
        folder.mkdir(parents=True)
        (folder / "kernel.cu").write_bytes(bytes(100))
        os.utime(folder, (time.time() - age_s,) * 2)

    document = stats(run)

    assert document["quarantine"]["entries"] == 1
    assert document["quarantine"]["size_bytes"] > cached.units[0].cubin_bytes
    assert document["abandoned"] == {"folders": 1, "size_bytes": 100}


def test_layers_do_not_count_towards_the_limit(
    run: Run, cached: PrewarmReport, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of a read-only layer are usable, and do not count towards the limit."""
    layer = move_to_layer(cache_dir, monkeypatch)

    document = stats(run)

    assert (document["entries"], document["size_bytes"]) == (0, 0)
    assert document["usable"] == len(cached.units)
    assert groups_by(document, "layer") == {str(layer): 2}


def test_the_text_has_the_same_numbers(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """Facts come first, then a table of groups."""
    lines = run("cache", "stats").stdout.splitlines()

    toolchain = cached.units[0].toolchain
    assert lines[0].split() == ["cache", str(cache_dir)]
    assert lines[1].startswith("kernels          2, ")
    assert lines[2].startswith(f"usable here      2: by {toolchain}, templates ")
    assert "by         name" in lines[lines.index("") + 1]
    assert any(line.split()[:3] == ["arch", "sm_80", "2"] for line in lines)
