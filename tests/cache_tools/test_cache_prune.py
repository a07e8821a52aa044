"""`mlagen cache prune`: removal by age, size, compiler or version."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from mlagen.engine import find_or_build
from mlagen.prewarming import PrewarmReport

from .altered import folder_of, move_to_layer, recast, snapshot, use
from .conftest import Run


def kept_in(cache_dir: Path) -> set[Path]:
    """Return the folders of the remaining entries."""
    return set((cache_dir / "v1" / "e").glob("*/*/*"))


def test_unused_kernels_are_removed(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """--older-than counts from the last use, and the rest stays."""
    old, young = (folder_of(unit, cache_dir) for unit in cached.units)
    use(old, age_s=40 * 86400, now=time.time())
    use(young, age_s=20 * 86400, now=time.time())

    result = run("cache", "prune", "--older-than", "30d")

    gone, summary = result.stdout.splitlines()
    assert result.exit_code == 0
    assert kept_in(cache_dir) == {young}
    assert gone.startswith(f"{cached.units[0].key[:8]} by {cached.units[0].toolchain}, ")
    assert gone.endswith(": unused")
    assert summary.startswith("removed 1 kernel, ")
    assert summary.endswith(f", from {cache_dir}")


def test_the_least_recently_used_are_removed_until_the_rest_fits(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """--max-size removes no more than necessary."""
    first, second = (folder_of(unit, cache_dir) for unit in cached.units)
    use(second, age_s=7200, now=time.time())
    size = sum(file.stat().st_size for file in first.iterdir())

    result = run("cache", "prune", "--max-size", str(size))

    assert kept_in(cache_dir) == {first}
    assert result.stdout.splitlines()[0].endswith(": size")


@pytest.mark.parametrize(
    ("size", "kept"), [("0", 0), ("1G", 2)], ids=["nothing fits", "everything fits"]
)
def test_a_size_limits_the_rest(
    size: str, kept: int, run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """Sizes have the syntax of MLAGEN_CACHE_MAX_SIZE."""
    result = run("cache", "prune", "--max-size", size)

    assert len(cached.units) == 2
    assert (result.exit_code, len(kept_in(cache_dir))) == (0, kept)


def test_kernels_of_another_compiler_are_removed(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """--other-toolchains keeps the kernels of the installed NVRTC."""
    folder = folder_of(cached.units[0], cache_dir)
    recast(folder, toolchain="nvrtc-12.8.1", keeps=True)

    result = run("cache", "prune", "--other-toolchains")

    assert result.stdout.splitlines()[0].endswith(": other toolchain")
    assert kept_in(cache_dir) == {folder_of(unit, cache_dir) for unit in cached.units}


def test_kernels_of_another_version_are_removed(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """--other-versions keeps the kernels of the installed sources."""
    folder = folder_of(cached.units[0], cache_dir)
    recast(folder, key_fields={"templates": "0" * 64}, keeps=True)

    result = run("cache", "prune", "--other-versions")

    assert result.stdout.splitlines()[0].endswith(": other version")
    assert kept_in(cache_dir) == {folder_of(unit, cache_dir) for unit in cached.units}


def test_a_damaged_kernel_has_no_version(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """--other-versions keeps a damaged kernel, --older-than removes it."""
    damaged = folder_of(cached.units[0], cache_dir)
    (damaged / "manifest.json").write_text("{")
    use(damaged, age_s=7200, now=time.time())

    by_version = run("cache", "prune", "--other-versions", "--dry-run")
    by_age = run("cache", "prune", "--older-than", "1h")

    assert by_version.stdout.startswith("would remove 0 kernels, ")
    assert by_age.stdout.splitlines()[-1].startswith("removed 1 kernel, ")
    assert damaged not in kept_in(cache_dir)


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (("--family", "combine"), 2),
        (("--arch", "sm_80"), 2),
        (("--arch", "sm_80", "--older-than", "1h"), 1),
        (("--arch", "sm_90a", "--max-size", "0"), 0),
    ],
    ids=["a family", "a target", "a target by age", "another target by size"],
)
def test_only_named_kernels_are_removed(
    options: tuple[str, ...], gone: int, run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """--arch and --family select kernels, or restrict the other options."""
    use(folder_of(cached.units[0], cache_dir), age_s=7200, now=time.time())

    result = run("cache", "prune", *options)

    assert (result.exit_code, len(kept_in(cache_dir))) == (0, 2 - gone), result.stdout


def test_a_dry_run_prints_the_same_and_removes_nothing(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """A dry run changes no byte and no time."""
    use(folder_of(cached.units[0], cache_dir), age_s=7200, now=time.time())
    before = snapshot(cache_dir)

    dry = run("cache", "prune", "--older-than", "1h", "--dry-run").stdout
    after = snapshot(cache_dir)
    real = run("cache", "prune", "--older-than", "1h").stdout

    assert after == before
    assert dry.replace("would remove", "removed") == real


def test_without_a_rule_nothing_is_removed(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """Pruning without an option is bad usage."""
    result = run("cache", "prune")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "mlagen: prune: expected an option that selects kernels, got none\n"
    assert len(kept_in(cache_dir)) == len(cached.units)


@pytest.mark.parametrize(
    "options",
    [("--older-than", "soon"), ("--older-than", "-1d"), ("--max-size", "big"), ("--arch", "sm_1")],
    ids=" ".join,
)
def test_an_invalid_value_removes_nothing(
    options: tuple[str, str], run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """The message has the value."""
    result = run("cache", "prune", *options)

    assert (result.exit_code, result.stdout) == (2, "")
    assert options[1] in result.stderr
    assert len(kept_in(cache_dir)) == len(cached.units)


def test_a_read_only_layer_is_never_touched(
    run: Run, cached: PrewarmReport, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of a read-only layer are neither removed nor counted."""
    layer = move_to_layer(cache_dir, monkeypatch)
    before = snapshot(layer)

    document = json.loads(run("cache", "prune", "--max-size", "0", "--json").stdout)

    assert len(cached.units) == 2
    assert (document["removed"], document["kept"]) == ([], 0)
    assert snapshot(layer) == before


def test_json_has_the_removed_and_the_kept(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """The document counts both; the text is on stderr."""
    old, young = (folder_of(unit, cache_dir) for unit in cached.units)
    use(old, age_s=7200, now=time.time())

    result = run("cache", "prune", "--older-than", "1h", "--dry-run", "--json")

    document = json.loads(result.stdout)
    (gone,) = document["removed"]
    assert (gone["path"], gone["why"], document["dry_run"]) == (str(old), "unused", True)
    assert document["freed_bytes"] == gone["size_bytes"]
    assert document["kept"] == 1
    assert document["kept_bytes"] == sum(file.stat().st_size for file in young.iterdir())
    assert result.stderr.splitlines()[-1].startswith("would remove 1 kernel, ")


def test_a_job_that_misses_a_pruned_kernel_compiles_it_again(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """Pruning with running jobs costs a compile, and nothing else."""
    unit = cached.units[0]
    run("cache", "prune", "--max-size", "0")

    outcome = find_or_build(unit.spec)

    assert outcome.entry.path == folder_of(unit, cache_dir)
    assert kept_in(cache_dir) == {outcome.entry.path}
