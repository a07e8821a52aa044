"""`mlagen cache verify`: what is bad is found, told, and moved away if asked."""

from __future__ import annotations

import json
from pathlib import Path

from mlagen.prewarming import PrewarmReport

from .conftest import Run, damage


def test_a_sound_cache_exits_with_0(run: Run, cached: PrewarmReport) -> None:
    """Every entry is read and counted."""
    result = run("cache", "verify")

    assert len(cached.units) == 2
    assert (result.exit_code, result.stdout) == (0, "2 entries: 2 sound, 0 bad\n")


def test_one_flipped_bit_is_found(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """A bad entry is told and left where it is, and the exit code is 1."""
    unit = cached.units[0]
    cubin = damage(unit.key, unit.toolchain, cache_dir)

    result = run("cache", "verify")

    bad, summary = result.stdout.splitlines()
    assert result.exit_code == 1
    assert bad.startswith(f"bad: {unit.key[:8]}: kernel.cubin: expected sha256 ")
    assert summary == "2 entries: 1 sound, 1 bad"
    assert cubin.exists()


def test_quarantine_moves_what_is_bad(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """After one check with --quarantine, the next finds nothing bad."""
    unit = cached.units[0]
    cubin = damage(unit.key, unit.toolchain, cache_dir)

    first = run("cache", "verify", "--quarantine")
    second = run("cache", "verify")

    assert first.exit_code == 1
    assert f"moved to {cache_dir / 'v1' / 'quarantine'}" in first.stdout
    assert not cubin.exists()
    assert (second.exit_code, second.stdout) == (0, "1 entry: 1 sound, 0 bad\n")


def test_json_lists_what_is_bad(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """The document has the problem and where the entry went; people read stderr."""
    unit = cached.units[0]
    damage(unit.key, unit.toolchain, cache_dir)

    result = run("cache", "verify", "--quarantine", "--json")

    document = json.loads(result.stdout)
    (bad,) = document["bad"]
    assert result.exit_code == 1
    assert document["verified"] == 2
    assert bad["key"] == unit.key
    assert bad["problem"].startswith("kernel.cubin: expected sha256 ")
    assert (Path(bad["moved_to"]) / "entry" / "kernel.cubin").is_file()
    assert result.stderr.splitlines()[-1] == "2 entries: 1 sound, 1 bad"
