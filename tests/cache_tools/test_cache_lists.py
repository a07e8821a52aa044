"""What `mlagen cache dir`, `ls`, `stats` and `verify` say of a cache."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from cache_tools.options.entry_options import Choice, chosen_entries, names_of
from cache_tools.tools.entries import iso_time
from mlagen.cache.store import kernel_store
from tests.cache.builds import cut
from tests.fixture_types import Patch

from .altered import damage, manifest_of, move_to_layer, recast, use
from .conftest import Cached, Setting, run

OLD = "nvrtc-12.8.1"
SPILLS = {"spill_store_bytes": 8, "spill_load_bytes": 12}


def spill(path: Path) -> Path:
    """Make a kernel appear to spill registers, in a larger manifest."""
    (resources,) = manifest_of(path).facts["resources"]
    return recast(path, facts={"resources": [resources | SPILLS], "note": "x" * 2000})


def test_each_entry_has_its_kernel_and_its_origin(cached: Cached) -> None:
    """Entries are sorted by their columns; a damaged one stands below them, and is counted."""
    listed = run.json("cache ls")["entries"]
    cut(cached.paths[0], 3)
    text = run("cache ls").stdout.splitlines()

    units = sorted(cached.units, key=lambda unit: int(unit.spec.key_fields()["head_dim_vo"]))
    for entry, unit in zip(listed, units, strict=True):
        assert (entry["key"], entry["toolchain"]) == (unit.key, unit.toolchain)
        assert entry["spec"] == unit.spec.key_fields()
        assert (entry["problem"], entry["created_by"]) == (None, "prewarm")
        assert entry["resources"][0]["registers"] == unit.registers
        assert Path(entry["path"]).name == f"{unit.key}.{unit.toolchain}"
    line = (
        f"damaged: {cached.keys[0][:8]}: expected the file of an entry, got one that begins b'mla'"
    )
    assert (line in text, len(text)) == (True, 4)


def groups_by(statistics: dict[str, Any], by: str) -> dict[str, int]:
    """Return the number of kernels per group of one criterion."""
    return {each["name"]: each["entries"] for each in statistics["groups"] if each["by"] == by}


@pytest.mark.parametrize("order", ["name", "size", "age", "spills"])
def test_the_order_can_be_chosen(order: str, cached: Cached) -> None:
    """The second of two by name comes first by size, by age and by spills."""
    dims = [int(unit.spec.key_fields()["head_dim_vo"]) for unit in cached.units]
    (_, first), (_, second) = sorted(zip(dims, cached.paths, strict=True))
    use(spill(second), age_s=0, now=1_700_000_000)
    listed = run.json("cache ls --sort", order)["entries"]
    by_name = listed if order == "name" else listed[::-1]
    assert [entry["key"] for entry in by_name] == [path.name[:64] for path in (first, second)]
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
    recast(cached.paths[0], toolchain=OLD, keeps=True)
    use(cached.paths[0], age_s=7200, now=time.time())
    listed = run.json("cache ls", *options.split())["entries"]
    assert len(listed) == count
    if "older" not in options and count == 3:
        assert {entry["path"] for entry in listed} > set(map(str, cached.paths))


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
    cached.paths[1].unlink()
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
    recast(cached.paths[0], created={"time": "2020-01-01T00:00:00+00:00"})
    use(cached.paths[1], age_s=7200, now=time.time())

    found = run.json("cache stats")

    files = list(cached.root.glob("v2/*/*"))
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
    first, second = cached.paths
    recast(first, toolchain=OLD, keeps=True)
    recast(first, key_fields={"templates": "0" * 64}, keeps=True)
    second.write_text("{")
    found = run.json("cache stats")
    assert (found["usable"], found["unusable"], found["damaged"]) == (1, 3, 1)
    assert groups_by(found, "toolchain") == {OLD: 1, cached.units[0].toolchain: 3}


def test_a_damaged_kernel_is_found_and_removed_on_request(cached: Cached) -> None:
    """`verify` leaves it without --remove."""
    path = damage(cached.paths[0])

    text = run("cache verify")
    kept = path.exists()
    found = run.json("cache verify --remove", code=1)

    (bad,) = found["bad"]
    line = f"bad: {cached.keys[0][:8]}: kernel.cubin: expected sha256 "
    assert (text.exit_code, text.stdout.startswith(line), kept) == (1, True, True)
    assert text.stdout.endswith("\n2 entries: 1 valid, 1 bad\n")
    assert (found["verified"], bad["key"], bad["is_removed"]) == (2, cached.keys[0], True)
    assert bad["problem"].startswith("kernel.cubin: expected sha256 ")
    assert not path.exists()
    clean = {"cache_dir": str(cached.root), "verified": 1, "bad": [], "unreadable": []}
    assert run.json("cache verify") == clean


def test_a_damaged_entry_matches_every_filter(cached: Cached) -> None:
    """An export does not omit it, a removal by name does."""
    damaged = cached.paths[0]
    cut(damaged, 3)
    toolchain = str(cached.units[0].toolchain)
    (stored,) = [each for each in kernel_store().entries() if each.problem]

    found = chosen_entries(kernel_store(), (), Choice(archs=["sm_80"], families=["combine"]))

    assert {each.path for each in found} == set(cached.paths)
    assert names_of(stored, "toolchain") == {toolchain, toolchain.partition(".")[0]}
    assert names_of(stored, "arch") == names_of(stored, "family") == set()
    assert run.json("cache ls --arch sm_80")["entries"][0]["problem"] is None
    (listed,) = [each for each in run.json("cache ls")["entries"] if each["problem"]]
    assert listed["problem"].startswith("expected the file of an entry, got")
    assert [name for name, value in listed.items() if value is not None] == [
        *("key", "toolchain", "path", "layer", "is_read_only", "size_bytes", "used", "problem")
    ]


@pytest.mark.parametrize("seconds", [-(2**40), -(2**34), 2**34])
def test_entries_of_any_time_are_listed(seconds: int, cached: Cached) -> None:
    """A file system stores any number as a time; one that is no date stops no command."""
    impossible = (-(2.0**40), 2.0**40, -1e300, 1e300, float("inf"), 0.0)
    assert [iso_time(each) for each in impossible] == [None] * 6
    for path in cached.paths:
        os.utime(path, (seconds, seconds))
    for command in ("ls", "ls --sort age", f"show {cached.keys[0]}", "stats", "verify"):
        for option in ((), ("--json",)):
            assert run("cache", *command.split(), *option).exit_code == 0
    assert run("cache prune --older-than 1d --dry-run").exit_code == 0


def test_facts_of_no_kernel_stop_no_command(cached: Cached) -> None:
    """A sealed manifest may have any texts and sizes: every command ends with 0."""
    (resources,) = manifest_of(cached.paths[0]).facts["resources"]
    nothing = dict.fromkeys(resources, 0) | {"symbol": ""}
    spec = {"arch": "sm_80", "head_dim_vo": "9" * 5000}
    kernel = {"symbol": "", "spec": spec, "dynamic_shared_bytes": 0}
    recast(cached.paths[0], facts={"kernel": kernel, "resources": [nothing, nothing]})
    lists = ("cache ls", "cache ls --sort spills", "cache stats", "cache verify")
    for words in (
        *([*line.split()] for line in (*lists, f"cache show {cached.keys[0]}")),
        ["kernel", "show", str(cached.units[0].spec)],
        ["prewarm", "--kernel", str(cached.units[0].spec)],
    ):
        for option in ((), ("--json",)):
            result = run(*words, *option)
            assert result.exit_code == 0, (words, result.output)
