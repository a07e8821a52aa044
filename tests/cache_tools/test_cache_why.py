"""`mlagen cache why`: the required key against the nearest cached kernel."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mlagen.prewarming import PrewarmReport
from mlagen.spec.combine import CombineSpec

from .altered import folder_of, move_to_layer, recast, snapshot
from .conftest import Run, damage


def table_in(text: str) -> dict[str, list[str]]:
    """Return the rows of the table of key fields by label."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("key_field"))
    rows = [line.split() for line in lines[start + 1 :]]
    return {row[0]: row[1:] for row in rows if len(row) == 3}


def test_a_cached_kernel_is_found(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """It exits with 0, and prints the kernel's path."""
    unit = cached.units[0]

    result = run("cache", "why", str(unit.spec))

    assert result.exit_code == 0
    assert result.stdout == f"found: {unit.spec}\n{folder_of(unit, cache_dir)}\n"


def test_a_kernel_of_a_layer_is_found_there(
    run: Run, cached: PrewarmReport, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The document names the read-only layer."""
    layer = move_to_layer(cache_dir, monkeypatch)

    document = json.loads(run("cache", "why", str(cached.units[0].spec), "--json").stdout)

    assert document["is_found"]
    assert (document["entry"]["layer"], document["entry"]["is_read_only"]) == (str(layer), True)


def test_a_missing_kernel_is_compared_with_the_nearest(run: Run, cached: PrewarmReport) -> None:
    """It exits with 1, and shows only the differing key fields."""
    spec = cached.units[0].spec
    assert isinstance(spec, CombineSpec)

    result = run("cache", "why", str(replace(spec, head_dim_vo=128)))

    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    assert lines[0] == "not found: absent"
    assert table_in(result.stdout) in (
        {"spec.head_dim_vo": ["128", "256"]},
        {"spec.head_dim_vo": ["128", "512"]},
    )
    assert lines[-1].startswith("run: mlagen prewarm --kernel 'combine(arch=sm_80, ")


def test_other_kernel_sources_are_explained(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """A sentence explains that differing template digests mean differing sources."""
    unit = cached.units[0]
    recast(folder_of(unit, cache_dir), key_fields={"templates": "0" * 64})

    result = run("cache", "why", str(unit.spec))

    assert result.exit_code == 1
    assert list(table_in(result.stdout)) == ["templates"]
    assert table_in(result.stdout)["templates"][1] == "00000000"
    assert "templates: the kernel sources differ" in result.stdout


def test_another_compiler_is_the_reason(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """A kernel of another NVRTC is a miss, and both compilers are shown."""
    unit = cached.units[0]
    recast(folder_of(unit, cache_dir), toolchain="nvrtc-12.8.1")

    result = run("cache", "why", str(unit.spec))

    assert result.stdout.startswith("not found: other toolchain\n")
    assert table_in(result.stdout) == {"toolchain": [unit.toolchain, "nvrtc-12.8.1"]}


def test_a_damaged_kernel_is_the_reason_and_stays(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """The damaged kernel is not quarantined, unlike in a call."""
    unit = cached.units[0]
    cubin = damage(unit.key, unit.toolchain, cache_dir)

    result = run("cache", "why", str(unit.spec))

    assert result.exit_code == 1
    assert result.stdout.startswith("not found: damaged: kernel.cubin: expected sha256 ")
    assert cubin.exists()


def test_a_folder_that_others_may_write_in_is_the_reason(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """The answer has the advice of the rejection."""
    cache_dir.chmod(0o777)

    result = run("cache", "why", str(cached.units[0].spec))

    assert result.exit_code == 1
    assert result.stdout.startswith("not found: unreadable: ")
    assert "MLAGEN_TRUST_SHARED=1" in result.stdout


def test_without_any_kernel_there_is_nothing_to_compare(run: Run, cache_dir: Path) -> None:
    """An empty cache is a plain miss, and is not created."""
    result = run("cache", "why", "combine(arch=sm_80, dtype=bf16, head_dim_vo=512)")

    assert result.exit_code == 1
    assert "no other combine is cached to compare with" in result.stdout
    assert not cache_dir.exists()


def test_a_cached_key_has_its_reason(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """Reason, author and time are printed, with the differences from the nearest earlier kernel."""
    first, second = cached.units
    recast(folder_of(first, cache_dir), created={"time": "2020-01-01T00:00:00+00:00"})
    recast(folder_of(second, cache_dir), created={"because": "other toolchain"})

    result = run("cache", "why", second.key[:8])

    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].startswith(f"{second.spec}, key {second.key[:8]}, by ")
    assert "compiled because: other toolchain, by prewarm of mlagen " in result.stdout
    dims = [unit.spec.key_fields()["head_dim_vo"] for unit in (second, first)]
    assert table_in(result.stdout) == {"spec.head_dim_vo": dims}


def test_a_later_kernel_is_not_compared(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """The first kernel of a family is compared with no later one."""
    first = cached.units[0]
    recast(folder_of(first, cache_dir), created={"time": "2020-01-01T00:00:00+00:00"})

    result = run("cache", "why", first.key)

    assert "no other combine is cached to compare with" in result.stdout


def test_a_kernel_without_a_recorded_reason_is_shown(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """A manifest without a reason is no error."""
    unit = cached.units[0]
    recast(folder_of(unit, cache_dir), created={"because": None})

    result = run("cache", "why", unit.key)

    assert (result.exit_code, "compiled because: not recorded" in result.stdout) == (0, True)


def test_nothing_is_changed(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """Neither a hit nor a miss changes a file."""
    before = snapshot(cache_dir)

    for kernel in (cached.units[0].key, str(cached.units[0].spec), str(cached.units[1].spec)):
        run("cache", "why", kernel)

    assert snapshot(cache_dir) == before


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            "abcdef",
            "key: expected a prefix of a cached key (mlagen cache ls), got abcdef",
        ),
        ("abc", "kernel: expected family(name=value, ...), got 'abc'"),
    ],
    ids=["a key that is not cached", "neither kernel nor key"],
)
def test_an_invalid_kernel_is_bad_usage(kernel: str, message: str, run: Run) -> None:
    """The message has the expected syntax."""
    result = run("cache", "why", kernel)

    assert (result.exit_code, result.stderr) == (2, f"mlagen: {message}\n")
