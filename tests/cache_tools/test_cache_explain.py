"""`mlagen cache explain`: two cached kernels side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlagen.prewarming import PrewarmReport

from .altered import folder_of, recast, snapshot
from .conftest import Run, damage
from .test_cache_why import table_in


def test_what_differs_is_shown_and_no_more(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """The key_fields that are alike are left out, what was measured is shown for both."""
    first, second = cached.units
    before = snapshot(cache_dir)

    result = run("cache", "explain", first.key[:8], second.key[:8])

    lines = result.stdout.splitlines()
    dims = [unit.spec.key_fields()["head_dim_vo"] for unit in (first, second)]
    assert result.exit_code == 0
    assert lines[:2] == [f"{first.key[:8]}: {first.spec}", f"{second.key[:8]}: {second.spec}"]
    assert table_in(result.stdout)["spec.head_dim_vo"] == dims
    assert "spec.dtype" not in result.stdout
    registers = next(line.split() for line in lines if line.startswith("registers"))
    assert registers == ["registers", str(first.registers), str(second.registers)]
    assert snapshot(cache_dir) == before


def test_one_kernel_by_two_compilers(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """Where the key is the same, the compilers are the headers and all that differs."""
    unit = cached.units[0]
    recast(folder_of(unit, cache_dir), toolchain="nvrtc-12.8.1", keeps=True)
    names = [f"{unit.key[:8]}/nvrtc-12.8.1", f"{unit.key[:8]}/{unit.toolchain}"]

    result = run("cache", "explain", *names)

    toolchains = ["nvrtc-12.8.1", unit.toolchain]
    assert [line.partition(":")[0] for line in result.stdout.splitlines()[:2]] == toolchains
    assert table_in(result.stdout)["toolchain"] == toolchains


def test_a_kernel_is_like_itself(run: Run, cached: PrewarmReport) -> None:
    """Without a difference there is no table of key_fields."""
    key = cached.units[0].key

    result = run("cache", "explain", key, key)

    assert result.exit_code == 0
    assert "ingredient" not in result.stdout


def test_json_has_both_and_every_fact(run: Run, cached: PrewarmReport) -> None:
    """Facts are there alike or not; differences only where there are some."""
    first, second = cached.units

    document = json.loads(run("cache", "explain", first.key, second.key, "--json").stdout)

    assert (document["first"]["key"], document["second"]["key"]) == (first.key, second.key)
    assert [item["ingredient"] for item in document["differences"]] == ["spec.head_dim_vo"]
    facts = {item["fact"]: (item["first"], item["second"]) for item in document["facts"]}
    assert facts["registers"] == (first.registers, second.registers)
    assert facts["created_by"] == ("prewarm", "prewarm")


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_damaged_kernel_is_not_compared(
    which: str, run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """What was altered is an error that says what and where."""
    bad, good = cached.units
    cubin = damage(bad.key, bad.toolchain, cache_dir)
    keys = (bad.key, good.key) if which == "first" else (good.key, bad.key)

    result = run("cache", "explain", *keys)

    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith("mlagen: cache: kernel.cubin: expected sha256 ")
    assert result.stderr.endswith(f": {cubin.parent}\n")


def test_several_compilers_have_to_be_told_apart(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """A key of two entries is rejected, with what to write instead."""
    unit = cached.units[0]
    recast(folder_of(unit, cache_dir), toolchain="nvrtc-12.8.1", keeps=True)

    result = run("cache", "explain", unit.key[:8], unit.key[:8])

    assert result.exit_code == 2
    assert result.stderr == (
        f"mlagen: key: expected {unit.key[:8]}/TOOLCHAIN, got no toolchain out of "
        f"nvrtc-12.8.1, {unit.toolchain}\n"
    )
