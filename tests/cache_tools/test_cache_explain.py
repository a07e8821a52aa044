"""`mlagen cache explain`: two cached kernels side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlagen.prewarming import PrewarmReport

from .altered import folder_of, recast, snapshot
from .conftest import Run, damage
from .test_cache_why import table_in


def test_only_differences_are_shown(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """Equal key fields are omitted; measurements are shown for both kernels."""
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
    """With equal keys, the compilers are the headers and the only difference."""
    unit = cached.units[0]
    recast(folder_of(unit, cache_dir), toolchain="nvrtc-12.8.1", keeps=True)
    names = [f"{unit.key[:8]}/nvrtc-12.8.1", f"{unit.key[:8]}/{unit.toolchain}"]

    result = run("cache", "explain", *names)

    toolchains = ["nvrtc-12.8.1", unit.toolchain]
    assert [line.partition(":")[0] for line in result.stdout.splitlines()[:2]] == toolchains
    assert table_in(result.stdout)["toolchain"] == toolchains


def test_a_kernel_equals_itself(run: Run, cached: PrewarmReport) -> None:
    """Without a difference there is no table of key fields."""
    key = cached.units[0].key

    result = run("cache", "explain", key, key)

    assert result.exit_code == 0
    assert "key_field" not in result.stdout


def test_json_has_both_and_every_fact(run: Run, cached: PrewarmReport) -> None:
    """The document has all facts of both kernels, and only differing key fields."""
    first, second = cached.units

    document = json.loads(run("cache", "explain", first.key, second.key, "--json").stdout)

    assert (document["first"]["key"], document["second"]["key"]) == (first.key, second.key)
    assert [item["key_field"] for item in document["differences"]] == ["spec.head_dim_vo"]
    facts = {item["fact"]: (item["first"], item["second"]) for item in document["facts"]}
    assert facts["registers"] == (first.registers, second.registers)
    assert facts["created_by"] == ("prewarm", "prewarm")


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_damaged_kernel_is_not_compared(
    which: str, run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """Damage is an error with the reason and the path."""
    bad, good = cached.units
    cubin = damage(bad.key, bad.toolchain, cache_dir)
    keys = (bad.key, good.key) if which == "first" else (good.key, bad.key)

    result = run("cache", "explain", *keys)

    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith("mlagen: cache: kernel.cubin: expected sha256 ")
    assert result.stderr.endswith(f": {cubin.parent}\n")


def test_an_ambiguous_compiler_is_rejected(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """A key with two entries is rejected with the required syntax."""
    unit = cached.units[0]
    recast(folder_of(unit, cache_dir), toolchain="nvrtc-12.8.1", keeps=True)

    result = run("cache", "explain", unit.key[:8], unit.key[:8])

    assert result.exit_code == 2
    assert result.stderr == (
        f"mlagen: key: expected {unit.key[:8]}/TOOLCHAIN, got no toolchain out of "
        f"nvrtc-12.8.1, {unit.toolchain}\n"
    )
