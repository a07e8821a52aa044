"""`mlagen cache why` and `cache explain`: kernels side by side, by their key fields."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache_tools.tools.differences import differences, key_of_entry, nearest_entry
from mlagen.cache.key import CacheKey
from mlagen.cache.store import KernelStore
from mlagen.spec.combine import CombineSpec
from tests.cache.builds import entry_folder, make_build, make_store

from .altered import damage, move_to_layer, recast, snapshot, use
from .conftest import Cached, Documented, Run

OLD = "nvrtc-12.8.1"
NEWEST = "nvrtc-13.5.37"
TIME = {"time": "2020-01-01T00:00:00+00:00"}


def fields_of(document: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the differing key fields."""
    return {item["key_field"]: tuple(item.values())[1:] for item in document["differences"]}


def dims_of(cached: Cached) -> list[str]:
    """Return the dims of both kernels."""
    return [unit.spec.key_fields()["head_dim_vo"] for unit in cached.units]


@pytest.mark.parametrize("is_layer", [False, True], ids=["the cache", "a layer"])
def test_a_cached_kernel_is_found(
    is_layer: bool, document: Documented, cached: Cached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The document names its folder, which nothing changes."""
    root = move_to_layer(cached.root, monkeypatch) if is_layer else cached.root
    before = snapshot(root)

    found = document("cache", "why", str(cached.units[0].spec))

    entry = found["entry"]
    assert (found["is_found"], found["key"]) == (True, cached.keys[0])
    assert (entry["layer"], entry["is_read_only"]) == (str(root), is_layer)
    assert snapshot(root) == before


def test_the_folder_of_a_found_kernel_is_printed(run: Run, cached: Cached) -> None:
    """It stands on its own line."""
    unit = cached.units[0]

    result = run("cache", "why", str(unit.spec))

    assert result.stdout == f"found: {unit.spec}\n{cached.folders[0]}\n"


def test_a_missing_kernel_is_compared_with_the_nearest(run: Run, cached: Cached) -> None:
    """Only the differing key fields are shown, and the last line compiles it."""
    spec = cached.units[0].spec
    assert isinstance(spec, CombineSpec)

    result = run("cache", "why", str(replace(spec, head_dim_vo=128)))

    lines = result.stdout.splitlines()
    assert (result.exit_code, lines[0]) == (1, "not found: absent")
    assert [line.split()[:2] for line in lines[3:-1]] == [["spec.head_dim_vo", "128"]]
    assert lines[-1].startswith("run: mlagen prewarm --kernel 'combine(arch=sm_80, ")


@pytest.mark.parametrize(
    ("changes", "reason", "field", "nearest"),
    [
        ({"key_fields": {"templates": "0" * 64}}, "absent", "templates", "0" * 64),
        ({"toolchain": OLD}, "other toolchain", "toolchain", OLD),
    ],
    ids=["sources", "compiler"],
)
def test_another_installation_is_the_reason(
    changes: dict[str, Any],
    reason: str,
    field: str,
    nearest: str,
    document: Documented,
    cached: Cached,
) -> None:
    """A kernel of other sources or of another NVRTC is a miss."""
    recast(cached.folders[0], **changes)

    found = document("cache", "why", str(cached.units[0].spec), code=1)

    assert (found["reason"], found["is_found"]) == (reason, False)
    assert fields_of(found).keys() == {field}
    assert fields_of(found)[field][1] == nearest


def test_a_damaged_kernel_is_the_reason_and_stays(
    document: Documented, run: Run, cached: Cached
) -> None:
    """It is not quarantined, unlike in a call."""
    cubin = damage(cached.folders[0])

    found = document("cache", "why", str(cached.units[0].spec), code=1)

    assert found["reason"] == "damaged"
    assert found["problem"].startswith("kernel.cubin: expected sha256 ")
    text = run("cache", "why", str(cached.units[0].spec)).stdout
    assert text.startswith("not found: damaged: kernel.cubin: expected sha256 ")
    assert f"nearest {cached.keys[0][:8]} has no differences: " in text
    assert cubin.exists()


def test_a_folder_that_others_may_write_in_is_the_reason(run: Run, cached: Cached) -> None:
    """The answer has the advice of the rejection."""
    cached.root.chmod(0o777)

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


def test_a_cached_key_has_its_reason(document: Documented, run: Run, cached: Cached) -> None:
    """It is compared with the nearest earlier kernel; the first of a family with none."""
    recast(cached.folders[0], created={**TIME, "because": None})
    recast(cached.folders[1], created={"because": "other toolchain"})
    dims = dims_of(cached)

    found, first = (document("cache", "why", key) for key in cached.keys[::-1])
    text = run("cache", "why", cached.keys[0][:8]).stdout

    assert (found["reason"], fields_of(found)) == (
        "other toolchain",
        {"spec.head_dim_vo": (dims[1], dims[0])},
    )
    assert (first["reason"], first["nearest"], first["differences"]) == (None, None, [])
    assert "compiled because: not recorded, by prewarm of mlagen " in text
    assert "no other combine is cached to compare with" in text


def test_only_differences_are_explained(document: Documented, run: Run, cached: Cached) -> None:
    """Equal key fields are omitted; measurements are shown for both kernels."""
    before = snapshot(cached.root)

    found = document("cache", "explain", *cached.keys)

    facts = {item["fact"]: (item["first"], item["second"]) for item in found["facts"]}
    assert [found[name]["key"] for name in ("first", "second")] == cached.keys
    assert fields_of(found) == {"spec.head_dim_vo": tuple(dims_of(cached))}
    assert facts["registers"] == tuple(unit.registers for unit in cached.units)
    assert facts["created_by"] == ("prewarm", "prewarm")
    assert snapshot(cached.root) == before
    itself = ("cache", "explain", *cached.keys[:1] * 2)
    assert document(*itself)["differences"] == []
    assert "key_field" not in run(*itself).stdout


def test_one_kernel_by_two_compilers(run: Run, cached: Cached) -> None:
    """The compilers are the headers and the only difference; a key alone is ambiguous."""
    recast(cached.folders[0], toolchain=OLD, keeps=True)
    toolchains, key = [OLD, cached.units[0].toolchain], cached.keys[0][:8]

    result = run("cache", "explain", *(f"{key}/{name}" for name in toolchains))
    rejected = run("cache", "explain", key, key)

    lines = result.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == toolchains
    assert [line.split() for line in lines[4:6]] == [["toolchain", *toolchains], []]
    names = ", ".join(map(str, toolchains))
    message = f"mlagen: key: expected {key}/TOOLCHAIN, got no toolchain out of {names}\n"
    assert (rejected.exit_code, rejected.stderr) == (2, message)


@pytest.mark.parametrize("which", ["explain first", "explain second", "show", "show --source"])
def test_a_damaged_kernel_is_not_shown(which: str, run: Run, cached: Cached) -> None:
    """Damage is an error with the reason and the path, wherever the kernel stands."""
    cubin = damage(cached.folders[0])
    command, *options = which.split()
    keys = cached.keys[: 2 if command == "explain" else 1][:: -1 if "second" in options else 1]

    result = run("cache", command, *keys, *(o for o in options if o.startswith("--")))

    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith("mlagen: cache: kernel.cubin: expected sha256 ")
    assert result.stderr.endswith(f": {cubin.parent}\n")


def make_key(toolchain: str = NEWEST, **key_fields: str) -> CacheKey:
    """Return the key of a small kernel."""
    fields = {"family": "attend", "spec.arch": "sm_80", "spec.page_size": "64"} | {
        name.replace("__", "."): value for name, value in key_fields.items()
    }
    return CacheKey(tuple(fields.items()), toolchain)


def filled(folder: Path, *keys: CacheKey) -> KernelStore:
    """Return a store with entries for these keys."""
    store = make_store(folder)
    for key in keys:
        store.find_or_build(key, lambda: make_build(toolchain=key.toolchain))  # noqa: B023 - at once
    return store


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("nvrtc-13", []), ("nvrtc-13.0.88", [("toolchain", "nvrtc-13.0.88", NEWEST)])],
)
def test_an_accepted_compiler_is_no_difference(
    wanted: str, found: list[tuple[str, str, str]]
) -> None:
    """The toolchain counts only if the key does not accept the other one."""
    assert differences(make_key(wanted), make_key(NEWEST)) == found


def test_the_fewest_differences_are_the_nearest(tmp_path: Path) -> None:
    """Kernels of another family are not compared, and a damaged entry has no key."""
    near, far = make_key(spec__page_size="16"), make_key(spec__page_size="16", spec__arch="sm_90a")
    store = filled(tmp_path, near, far, make_key(family="combine"))

    found = nearest_entry(make_key(), store.entries())

    assert found is not None
    assert (found[0].key, found[1]) == (near.digest, [("spec.page_size", "64", "16")])
    assert nearest_entry(make_key(family="nothing like it"), store.entries()) is None
    (entry_folder(tmp_path, near) / "manifest.json").unlink()
    (again,) = [each for each in store.entries() if each.key == near.digest]
    assert key_of_entry(again) is None


def test_ties_go_to_the_most_recently_used(tmp_path: Path) -> None:
    """Of two equally near entries the most recently used is returned."""
    old, young = make_key(spec__page_size="16"), make_key(spec__page_size="32")
    store = filled(tmp_path, young, old)
    use(entry_folder(tmp_path, old), age_s=7200, now=time.time())
    use(entry_folder(tmp_path, young), age_s=3600, now=time.time())

    found = nearest_entry(make_key(), store.entries())

    assert found is not None
    assert found[0].key == young.digest
