"""`mlagen cache ls`: a row for each kernel."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from mlagen.cache.entry import Manifest
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.prewarming import PrewarmReport

from .conftest import Run


def test_an_empty_cache_is_said_to_be_empty(run: Run, cache_dir: Path) -> None:
    """Without kernels there is no table."""
    result = run("cache", "ls")

    assert (result.exit_code, result.stdout) == (0, f"0 kernels, 0 B, in {cache_dir}\n")


def test_kernels_are_listed_in_the_order_of_what_they_are(run: Run, cached: PrewarmReport) -> None:
    """Rows are sorted by number, not by letter, and carry what ptxas said."""
    result = run("cache", "ls")

    keys = {unit.spec.ingredients()["head_dim_vo"]: unit.key[:8] for unit in cached.units}
    header, *rows = [line.split() for line in result.stdout.splitlines()[:3]]
    assert header[:4] == ["key", "kernel", "arch", "dtype"]
    assert [row[:5] for row in rows] == [
        [keys[rank], "combine_splits", "sm_80", "bf16", rank] for rank in ("256", "512")
    ]
    assert {row[5] for row in rows} == {str(unit.registers) for unit in cached.units}
    assert result.stdout.splitlines()[-1].startswith(f"2 kernels by {find_nvrtc()}, ")


def test_kernels_of_several_compilers_say_by_which(run: Run, cached: PrewarmReport) -> None:
    """Where a kernel is kept as two compilers made it, the rows tell them apart."""
    document = json.loads(run("cache", "ls", "--json").stdout)
    folder = Path(document["entries"][0]["path"])
    other = Manifest.from_json((folder / "manifest.json").read_bytes())
    shutil.copytree(folder, folder.parent / "nvrtc-12.8.93")
    manifest = replace(other, toolchain="nvrtc-12.8.93")
    (folder.parent / "nvrtc-12.8.93" / "manifest.json").write_bytes(manifest.to_json())

    lines = run("cache", "ls").stdout.splitlines()

    assert len(cached.units) == 2
    assert sorted(line.split()[-1] for line in lines[1:4]) == [
        "nvrtc-12.8.93",
        str(find_nvrtc()),
        str(find_nvrtc()),
    ]
    assert lines[4].startswith(f"3 kernels by nvrtc-12.8.93, {find_nvrtc()}, ")


def test_a_damaged_entry_is_listed_with_its_problem(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """What cannot be read is told, beside what can."""
    unit = cached.units[0]
    folder = cache_dir / "v1" / "e" / unit.key[:2] / unit.key / unit.toolchain
    (folder / "manifest.json").unlink()

    result = run("cache", "ls")

    line = f"damaged: {unit.key[:8]}: manifest.json: expected a regular file, got nothing"
    assert result.exit_code == 0
    assert line in result.stdout.splitlines()
    assert len(result.stdout.splitlines()) == 4


def test_json_has_all_there_is_to_know(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """Each entry has its key, place, ingredients, resources and origin."""
    document = json.loads(run("cache", "ls", "--json").stdout)

    assert document["cache_dir"] == str(cache_dir)
    assert [entry["key"] for entry in document["entries"]] == sorted(u.key for u in cached.units)
    for entry in document["entries"]:
        assert entry["problem"] is None
        assert entry["created_by"] == "prewarm"
        assert entry["spec"]["dtype"] == "bf16"
        assert entry["resources"][0]["symbol"] == "combine_splits"
        assert Path(entry["path"]).is_dir()
