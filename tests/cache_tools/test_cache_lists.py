"""What `mlagen cache dir`, `ls`, `stats` and `verify` say of a cache."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from cache_tools.options.entry_options import Choice, chosen_entries, is_older, names_of
from cache_tools.tools.entries import iso_time
from mlagen.cache.default_store import kernel_store
from tests.fixture_types import Patch

from .altered import damage, move_to_layer, recast, use
from .conftest import Cached, Setting, run

OLD = "nvrtc-12.8.1"
SPILLS = {"spill_store_bytes": 8, "spill_load_bytes": 12}


def spill(folder: Path) -> Path:
    """Make a kernel appear to spill registers, in a larger manifest."""
    (resources,) = json.loads((folder / "manifest.json").read_text())["facts"]["resources"]
    return recast(folder, facts={"resources": [resources | SPILLS], "note": "x" * 2000})


def test_each_entry_has_its_kernel_and_its_origin(cached: Cached) -> None:
    """Entries are sorted by their columns; a damaged one stands below them, and is counted."""
    listed = run.json("cache ls")["entries"]
    (cached.folders[0] / "manifest.json").unlink()
    text = run("cache ls").stdout.splitlines()

    units = sorted(cached.units, key=lambda unit: int(unit.spec.key_fields()["head_dim_vo"]))
    for entry, unit in zip(listed, units, strict=True):
        assert (entry["key"], entry["toolchain"]) == (unit.key, unit.toolchain)
        assert entry["spec"] == unit.spec.key_fields()
        assert (entry["problem"], entry["created_by"]) == (None, "prewarm")
        assert entry["resources"][0]["registers"] == unit.registers
        assert Path(entry["path"]).parent.name == unit.key
    line = f"damaged: {cached.keys[0][:8]}: manifest.json: expected a regular file, got nothing"
    assert (line in text, len(text)) == (True, 4)


def groups_by(statistics: dict[str, Any], by: str) -> dict[str, int]:
    """Return the number of kernels per group of one criterion."""
    return {each["name"]: each["entries"] for each in statistics["groups"] if each["by"] == by}


@pytest.mark.parametrize("order", ["name", "size", "age", "spills"])
def test_the_order_can_be_chosen(order: str, cached: Cached) -> None:
    """The second of two by name comes first by size, by age and by spills."""
    dims = [int(unit.spec.key_fields()["head_dim_vo"]) for unit in cached.units]
    (_, first), (_, second) = sorted(zip(dims, cached.folders, strict=True))
    use(spill(second), age_s=0, now=1_700_000_000)
    listed = run.json("cache ls --sort", order)["entries"]
    by_name = listed if order == "name" else listed[::-1]
    assert [entry["key"] for entry in by_name] == [first.parent.name, second.parent.name]
    assert by_name[1]["used"] == "2023-11-14T22:13:20+00:00"


UNUSED = "--older-than 1h"
COUNTS = {
    3: ["", "--arch sm_80", "--arch sm_80,sm_90a", "--family combine,mla_sm80"],
    1: [f"--toolchain {OLD}", "--toolchain nvrtc-12", UNUSED],
    0: ["--arch sm_90a", "--family mla_sm80", "--toolchain nvrtc-1", f"{UNUSED} --toolchain {OLD}"],
}


@pytest.mark.parametrize(
    ("options", "count"), [(each, count) for count, options in COUNTS.items() for each in options]
)
def test_a_list_can_be_filtered(options: str, count: int, cached: Cached) -> None:
    """A value of each filter must match, and the age; no match is no error."""
    recast(cached.folders[0], toolchain=OLD, keeps=True)
    use(cached.folders[0], age_s=7200, now=time.time())
    listed = run.json("cache ls", *options.split())["entries"]
    assert len(listed) == count
    if "older" not in options and count == 3:
        assert {entry["path"] for entry in listed} > set(map(str, cached.folders))


def test_layers_are_listed_on_request_and_not_counted(cached: Cached, monkeypatch: Patch) -> None:
    """Without --layers, only the cache folder is listed; kernels of a layer are usable."""
    layer = move_to_layer(cached.root, monkeypatch)

    assert run.json("cache ls")["entries"] == []
    assert {each["key"] for each in run.json("cache ls --layers")["entries"]} == set(cached.keys)
    assert run("cache ls").stdout == f"0 kernels, 0 B, in {cached.root}\n"
    assert run("cache ls --layers").stdout.endswith(f", in {cached.root}, {layer}\n")
    found = run.json("cache stats")
    assert (found["entries"], found["size_bytes"], found["usable"]) == (0, 0, 2)
    assert groups_by(found, "layer") == {str(layer): 2}


def test_layers_are_selected_on_request(cached: Cached, tmp_path: Path, setting: Setting) -> None:
    """A kernel in both places is selected once, from the cache folder; a key asks for no layer."""
    layer = tmp_path / "layer"
    shutil.copytree(cached.root, layer)
    shutil.rmtree(cached.folders[1])
    setting("MLAGEN_CACHE_RO", layer)
    export = ("cache", "export", str(tmp_path / "k.tar.gz"))

    every = run.json(*export, "--layers")["entries"]
    rejected = run(*export, cached.keys[1])

    assert [entry["key"] for entry in every] == sorted(cached.keys)
    assert [entry["key"] for entry in run.json(*export)["entries"]] == cached.keys[:1]
    assert len(run.json(*export, cached.keys[1], "--layers")["entries"]) == 1
    assert rejected.exit_code == 2
    assert "mlagen: kernels: expected matching ones (--layers: " in rejected.stderr


def test_kernels_are_counted_with_first_and_last(cached: Cached, setting: Setting) -> None:
    """The size is a share of the limit; oldest is by compile time, longest unused by use."""
    recast(cached.folders[0], created={"time": "2020-01-01T00:00:00+00:00"})
    use(cached.folders[1], age_s=7200, now=time.time())

    found = run.json("cache stats")

    files = [path for path in (cached.root / "v1" / "e").rglob("*") if path.is_file()]
    assert (found["entries"], found["size_bytes"]) == (2, sum(f.stat().st_size for f in files))
    assert (found["usable"], found["unusable"], found["damaged"]) == (2, 0, 0)
    for by, name in (("family", "combine"), ("arch", "sm_80"), ("layer", str(cached.root))):
        assert groups_by(found, by) == {name: 2}
    assert found["oldest"] == {"key": cached.keys[0], "time": "2020-01-01T00:00:00+00:00"}
    assert found["newest"]["key"] == found["longest_unused"]["key"] == cached.keys[1]
    for limit, share, text in (
        ("1M", found["size_bytes"] / (1 << 20), "% of 1.0 MiB"),
        ("0", None, "no limit"),
    ):
        setting("MLAGEN_CACHE_MAX_SIZE", limit)
        assert run.json("cache stats")["share_of_max"] == share
        assert text in run("cache stats").stdout


def test_unusable_kernels_are_counted_separately(cached: Cached) -> None:
    """Another compiler, other kernel sources and damage each make a kernel unusable here."""
    first, second = cached.folders
    recast(first, toolchain=OLD, keeps=True)
    recast(first, key_fields={"templates": "0" * 64}, keeps=True)
    (second / "manifest.json").write_text("{")
    found = run.json("cache stats")
    assert (found["usable"], found["unusable"], found["damaged"]) == (1, 3, 1)
    assert groups_by(found, "toolchain") == {OLD: 1, cached.units[0].toolchain: 3}


def test_a_damaged_kernel_is_found_and_moved_on_request(cached: Cached) -> None:
    """`verify` leaves it without --quarantine; `stats` counts it, and abandoned folders."""
    cubin = damage(cached.folders[0])
    for name, age_s in (("old", 7200), ("current", 0)):
        folder = cached.root / "v1" / "staging" / f"{name}.elsewhere.1.abcdef01"
        folder.mkdir(parents=True)
        (folder / "kernel.cu").write_bytes(bytes(100))
        os.utime(folder, (time.time() - age_s,) * 2)

    text = run("cache verify")
    kept = cubin.exists()
    found = run.json("cache verify --quarantine", code=1)

    (bad,) = found["bad"]
    line = f"bad: {cached.keys[0][:8]}: kernel.cubin: expected sha256 "
    assert (text.exit_code, text.stdout.startswith(line), kept) == (1, True, True)
    assert text.stdout.endswith("\n2 entries: 1 valid, 1 bad\n")
    assert (found["verified"], bad["key"]) == (2, cached.keys[0])
    assert bad["problem"].startswith("kernel.cubin: expected sha256 ")
    assert (Path(bad["moved_to"]) / "entry" / "kernel.cubin").is_file()
    assert not cubin.exists()
    clean = {"cache_dir": str(cached.root), "verified": 1, "bad": [], "unreadable": []}
    assert run.json("cache verify") == clean
    counted = run.json("cache stats")
    assert counted["quarantine"]["entries"] == 1
    assert counted["quarantine"]["size_bytes"] > (cached.units[0].cubin_bytes or 0)
    assert counted["abandoned"] == {"folders": 1, "size_bytes": 100}


def test_a_damaged_entry_matches_every_filter(cached: Cached) -> None:
    """An export does not omit it, a removal by name does; its age is infinite."""
    damaged = cached.folders[0]
    (damaged / "manifest.json").unlink()
    (stored,) = [each for each in kernel_store().entries() if each.problem]

    found = chosen_entries(kernel_store(), (), Choice(archs=["sm_80"], families=["combine"]))

    assert {each.path for each in found} == set(cached.folders)
    assert names_of(stored, "toolchain") == {damaged.name, damaged.name.partition(".")[0]}
    assert names_of(stored, "arch") == names_of(stored, "family") == set()
    assert is_older(stored, 1e9)
    assert run.json("cache ls --arch sm_80")["entries"][0]["problem"] is None
    (listed,) = [each for each in run.json("cache ls")["entries"] if each["problem"]]
    assert listed["problem"].startswith("manifest.json: expected a regular file, got nothing")
    assert [name for name, value in listed.items() if value is not None] == [
        *("key", "toolchain", "path", "layer", "is_read_only", "size_bytes", "problem")
    ]


@pytest.mark.parametrize("seconds", [-(2**40), -(2**34), 2**34])
def test_entries_of_any_time_are_listed(seconds: int, cached: Cached) -> None:
    """A file system stores any number as a time; one that is no date stops no command."""
    impossible = (-(2.0**40), 2.0**40, -1e300, 1e300, float("inf"), 0.0)
    assert [iso_time(each) for each in impossible] == [None] * 6
    for manifest in cached.root.rglob("manifest.json"):
        os.utime(manifest, (seconds, seconds))
    for command in ("ls", "ls --sort age", f"show {cached.keys[0]}", "stats", "verify"):
        for option in ((), ("--json",)):
            assert run("cache", *command.split(), *option).exit_code == 0
    assert run("cache prune --older-than 1d --dry-run").exit_code == 0


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_compile_time_that_is_not_finite_is_damage(value: str, cached: Cached) -> None:
    """JSON has no such numbers, so none is printed."""
    manifest = cached.folders[0] / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(re.sub(r'"compile_ms": [^,}]+', f'"compile_ms": {value}', text))
    listed = run.json("cache ls")["entries"]
    assert sum(entry["problem"] is not None for entry in listed) == 1


def test_facts_of_no_kernel_stop_no_command(cached: Cached) -> None:
    """A sealed manifest may have any texts and sizes: every command ends with 0."""
    (resources,) = json.loads((cached.folders[0] / "manifest.json").read_text())["facts"][
        "resources"
    ]
    nothing = dict.fromkeys(resources, 0) | {"symbol": ""}
    spec = {"arch": "sm_80", "head_dim_vo": "9" * 5000}
    kernel = {"symbol": "", "spec": spec, "dynamic_shared_bytes": 0}
    recast(cached.folders[0], facts={"kernel": kernel, "resources": [nothing, nothing]})
    lists = ("cache ls", "cache ls --sort spills", "cache stats", "cache verify")
    for words in (
        *([*line.split()] for line in (*lists, f"cache show {cached.keys[0]}")),
        ["kernel", "show", str(cached.units[0].spec)],
        ["prewarm", "--kernel", str(cached.units[0].spec)],
    ):
        for option in ((), ("--json",)):
            result = run(*words, *option)
            assert result.exit_code == 0, (words, result.output)
