"""`mlagen cache verify`: finds bad entries, and quarantines them on request."""

from __future__ import annotations

import json
from pathlib import Path

from mlagen.prewarming import PrewarmReport

from .conftest import Run, damage


def test_a_valid_cache_exits_with_0(run: Run, cached: PrewarmReport) -> None:
    """Every entry is read and counted."""
    result = run("cache", "verify")

    assert len(cached.units) == 2
    assert (result.exit_code, result.stdout) == (0, "2 entries: 2 valid, 0 bad\n")


def test_one_flipped_bit_is_found(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """A bad entry is reported and stays, and the exit code is 1."""
    unit = cached.units[0]
    cubin = damage(unit.key, unit.toolchain, cache_dir)

    result = run("cache", "verify")

    bad, summary = result.stdout.splitlines()
    assert result.exit_code == 1
    assert bad.startswith(f"bad: {unit.key[:8]}: kernel.cubin: expected sha256 ")
    assert summary == "2 entries: 1 valid, 1 bad"
    assert cubin.exists()


def test_quarantine_moves_bad_entries(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """After a run with --quarantine, the next one finds no bad entry."""
    unit = cached.units[0]
    cubin = damage(unit.key, unit.toolchain, cache_dir)

    first = run("cache", "verify", "--quarantine")
    second = run("cache", "verify")

    assert first.exit_code == 1
    assert f"moved to {cache_dir / 'v1' / 'quarantine'}" in first.stdout
    assert not cubin.exists()
    assert (second.exit_code, second.stdout) == (0, "1 entry: 1 valid, 0 bad\n")


def test_json_lists_bad_entries(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """The document has the problem and the new path; the text is on stderr."""
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
    assert result.stderr.splitlines()[-1] == "2 entries: 1 valid, 1 bad"
