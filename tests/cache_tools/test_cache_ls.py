"""`mlagen cache ls`: a row per kernel."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mlagen.cache.entry import Manifest
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.prewarming import PrewarmReport

from .altered import folder_of, move_to_layer, recast, use
from .conftest import Run


def test_an_empty_cache_is_reported_as_empty(run: Run, cache_dir: Path) -> None:
    """Without kernels there is no table."""
    result = run("cache", "ls")

    assert (result.exit_code, result.stdout) == (0, f"0 kernels, 0 B, in {cache_dir}\n")


def test_rows_are_sorted_by_their_columns(run: Run, cached: PrewarmReport) -> None:
    """Rows are in numeric order, and have the resources of ptxas."""
    result = run("cache", "ls")

    keys = {unit.spec.key_fields()["head_dim_vo"]: unit.key[:8] for unit in cached.units}
    header, *rows = [line.split() for line in result.stdout.splitlines()[:3]]
    assert header[:4] == ["key", "kernel", "arch", "dtype"]
    assert [row[:5] for row in rows] == [
        [keys[rank], "combine", "sm_80", "bf16", rank] for rank in ("256", "512")
    ]
    assert {row[5] for row in rows} == {str(unit.registers) for unit in cached.units}
    assert result.stdout.splitlines()[-1].startswith(f"2 kernels by {find_nvrtc()}, ")


def test_kernels_of_several_compilers_have_a_toolchain_column(
    run: Run, cached: PrewarmReport
) -> None:
    """A toolchain column distinguishes the entries of one key."""
    document = json.loads(run("cache", "ls", "--json").stdout)
    folder = Path(document["entries"][0]["path"])
    other = Manifest.from_json((folder / "manifest.json").read_bytes())
    shutil.copytree(folder, folder.parent / "nvrtc-12.8.1")
    manifest = replace(other, toolchain="nvrtc-12.8.1")
    (folder.parent / "nvrtc-12.8.1" / "manifest.json").write_bytes(manifest.to_json())

    lines = run("cache", "ls").stdout.splitlines()

    assert len(cached.units) == 2
    assert sorted(line.split()[-1] for line in lines[1:4]) == [
        "nvrtc-12.8.1",
        str(find_nvrtc()),
        str(find_nvrtc()),
    ]
    assert lines[4].startswith(f"3 kernels by nvrtc-12.8.1, {find_nvrtc()}, ")


def test_a_damaged_entry_is_listed_with_its_problem(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """A damaged entry is reported below the table of the others."""
    unit = cached.units[0]
    folder = cache_dir / "v1" / "e" / unit.key[:2] / unit.key / unit.toolchain
    (folder / "manifest.json").unlink()

    result = run("cache", "ls")

    line = f"damaged: {unit.key[:8]}: manifest.json: expected a regular file, got nothing"
    assert result.exit_code == 0
    assert line in result.stdout.splitlines()
    assert len(result.stdout.splitlines()) == 4


def test_json_has_every_field(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """Each entry has its key, path, key fields, resources and origin."""
    document = json.loads(run("cache", "ls", "--json").stdout)

    assert document["cache_dir"] == str(cache_dir)
    by_size = sorted(cached.units, key=lambda u: int(u.spec.key_fields()["head_dim_vo"]))
    assert [entry["key"] for entry in document["entries"]] == [unit.key for unit in by_size]
    for entry in document["entries"]:
        assert entry["problem"] is None
        assert entry["created_by"] == "prewarm"
        assert entry["spec"]["dtype"] == "bf16"
        assert entry["resources"][0]["symbol"] == "combine"
        assert Path(entry["path"]).is_dir()


@pytest.mark.parametrize("order", ["name", "size", "age", "spills"])
def test_the_order_can_be_chosen(
    order: str, run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """The second of two by name comes first by size, by age and by spills."""
    units = sorted(cached.units, key=lambda unit: int(unit.spec.key_fields()["head_dim_vo"]))
    first, second = (folder_of(unit, cache_dir) for unit in units)
    manifest = json.loads((second / "manifest.json").read_text())
    (resources,) = manifest["facts"]["resources"]
    recast(second, facts={"resources": [resources | {"spill_store_bytes": 8}], "note": "x" * 2000})
    use(second, age_s=7200, now=time.time())

    result = run("cache", "ls", "--sort", order)

    keys = [line.split()[0] for line in result.stdout.splitlines()[1:3]]
    expected = [path.parent.name[:8] for path in (first, second)]
    assert keys == (expected if order == "name" else expected[::-1])


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (("--arch", "sm_80"), 2),
        (("--arch", "sm_90a"), 0),
        (("--family", "combine,mla_sm80"), 2),
        (("--toolchain", "nvrtc-12.8.1"), 0),
        (("--older-than", "1h"), 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_list_can_be_filtered(
    options: tuple[str, str], count: int, run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """Only matching kernels are listed and counted, and no match is no error."""
    use(folder_of(cached.units[0], cache_dir), age_s=7200, now=time.time())

    result = run("cache", "ls", *options)

    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith(f"{count} kernel")


def test_the_last_use_is_shown(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """The table has the age, the document the time."""
    use(folder_of(cached.units[0], cache_dir), age_s=0, now=1_700_000_000)

    row = next(
        line
        for line in run("cache", "ls").stdout.splitlines()
        if line.startswith(cached.units[0].key[:8])
    )
    document = json.loads(run("cache", "ls", "--json", "--sort", "age").stdout)

    assert row.endswith(" d ago")
    assert document["entries"][0]["used"] == "2023-11-14T22:13:20+00:00"


def test_layers_are_listed_on_request(
    run: Run, cached: PrewarmReport, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --layers, only the cache folder is listed."""
    layer = move_to_layer(cache_dir, monkeypatch)

    own = run("cache", "ls").stdout
    every = run("cache", "ls", "--layers").stdout

    assert own == f"0 kernels, 0 B, in {cache_dir}\n"
    assert every.splitlines()[-1].startswith(f"{len(cached.units)} kernels by ")
    assert every.endswith(f", in {cache_dir}, {layer}\n")
