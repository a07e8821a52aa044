"""`mlagen resources`: ptxas' resources of every cached kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlagen.prewarming import PrewarmReport, PrewarmUnit

from .altered import folder_of, move_to_layer, recast
from .conftest import Run


def spill(unit: PrewarmUnit, cache_dir: Path) -> None:
    """Make a kernel appear to spill registers."""
    document = json.loads((folder_of(unit, cache_dir) / "manifest.json").read_text())
    (resources,) = document["facts"]["resources"]
    spills = {"spill_store_bytes": 8, "spill_load_bytes": 12}
    recast(folder_of(unit, cache_dir), facts={"resources": [resources | spills]})


def test_every_kernel_has_a_row(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """Rows are sorted by their columns, with the numbers of ptxas."""
    result = run("resources")

    header, *rows, summary = [line.split() for line in result.stdout.splitlines()]
    units = sorted(cached.units, key=lambda unit: int(unit.spec.key_fields()["head_dim_vo"]))
    assert result.exit_code == 0
    assert header[-5:] == [
        *("registers", "spill_bytes", "stack_bytes", "static_shared_bytes", "shared_bytes")
    ]
    assert [row[0] for row in rows] == [unit.key[:8] for unit in units]
    assert [row[-5] for row in rows] == [str(unit.registers) for unit in units]
    assert " ".join(summary) == f"2 kernels, 0 with spills, in {cache_dir}"


@pytest.mark.parametrize(
    ("option", "spills", "code"),
    [((), True, 0), (("--fail-on-spill",), True, 1), (("--fail-on-spill",), False, 0)],
    ids=["no option", "a spill", "none"],
)
def test_a_spill_fails_on_request(
    option: tuple[str, ...],
    spills: bool,
    code: int,
    run: Run,
    cached: PrewarmReport,
    cache_dir: Path,
) -> None:
    """The exit code is for CI; the table is printed either way."""
    if spills:
        spill(cached.units[0], cache_dir)

    result = run("resources", *option)

    assert result.exit_code == code
    assert len(result.stdout.splitlines()) == 4
    assert f"2 kernels, {int(spills)} with spills, " in result.stdout


def test_filters_restrict_the_check(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """A filter excludes the kernel that spills."""
    spill(cached.units[0], cache_dir)

    result = run("resources", "--fail-on-spill", "--arch", "sm_90a")

    assert (result.exit_code, result.stdout) == (0, f"0 kernels, 0 with spills, in {cache_dir}\n")


def test_json_splits_spills_and_shared_memory(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """The document has the sums and their parts; the text is on stderr."""
    spill(cached.units[0], cache_dir)

    result = run("resources", "--fail-on-spill", "--json")

    document = json.loads(result.stdout)
    (kernel,) = [kernel for kernel in document["kernels"] if kernel["spill_bytes"]]
    assert (result.exit_code, document["spilling"]) == (1, 1)
    assert kernel["key"] == cached.units[0].key
    assert [kernel[f"spill{name}_bytes"] for name in ("", "_store", "_load")] == [20, 8, 12]
    shared = [kernel[f"{name}_shared_bytes"] for name in ("static", "dynamic")]
    assert kernel["shared_bytes"] == sum(shared)
    assert result.stderr.endswith(f"2 kernels, 1 with spills, in {cache_dir}\n")


def test_a_damaged_kernel_is_counted(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """A damaged kernel has no row, and counts in the last line."""
    (folder_of(cached.units[0], cache_dir) / "manifest.json").write_text("{")

    result = run("resources")

    assert result.exit_code == 0
    assert result.stdout.endswith(f"1 kernel, 0 with spills, 1 damaged, in {cache_dir}\n")


def test_layers_are_listed_on_request(
    run: Run, cached: PrewarmReport, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --layers, only the cache folder is listed."""
    move_to_layer(cache_dir, monkeypatch)

    own = json.loads(run("resources", "--json").stdout)
    every = json.loads(run("resources", "--layers", "--json").stdout)

    assert own["kernels"] == []
    assert {kernel["key"] for kernel in every["kernels"]} == {unit.key for unit in cached.units}
