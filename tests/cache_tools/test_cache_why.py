"""`mlagen cache why` and `cache explain`: kernels side by side, by their key fields."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache_tools.tools.differences import differences, key_of_entry, nearest_entry
from mlagen.cache.key import CacheKey
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
    is_layer: bool, run: Run, document: Documented, cached: Cached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Document and text name its folder, which nothing changes."""
    root = move_to_layer(cached.root, monkeypatch) if is_layer else cached.root
    before, spec = snapshot(root), str(cached.units[0].spec)

    found, text = document("cache", "why", spec), run("cache", "why", spec).stdout

    entry = found["entry"]
    assert (found["is_found"], found["key"]) == (True, cached.keys[0])
    assert (entry["layer"], entry["is_read_only"]) == (str(root), is_layer)
    assert text == f"found: {spec}\n{entry['path']}\n"
    assert snapshot(root) == before


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
    """It is not quarantined, unlike in a call; a folder that others may write in is another."""
    cubin, spec = damage(cached.folders[0]), str(cached.units[0].spec)

    found, text = document("cache", "why", spec, code=1), run("cache", "why", spec).stdout
    cached.root.chmod(0o777)
    unreadable = run("cache", "why", spec)

    assert found["reason"] == "damaged"
    assert found["problem"].startswith("kernel.cubin: expected sha256 ")
    assert text.startswith("not found: damaged: kernel.cubin: expected sha256 ")
    assert f"nearest {cached.keys[0][:8]} has no differences: " in text
    assert unreadable.exit_code == 1
    assert unreadable.stdout.startswith("not found: unreadable: ")
    assert "MLAGEN_TRUST_SHARED=1" in unreadable.stdout
    assert cubin.exists()


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

    assert found["reason"] == "other toolchain"
    assert fields_of(found) == {"spec.head_dim_vo": (dims[1], dims[0])}
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
    toolchains, key = [OLD, str(cached.units[0].toolchain)], cached.keys[0][:8]

    result = run("cache", "explain", *(f"{key}/{name}" for name in toolchains))
    rejected = run("cache", "explain", key, key)

    lines = result.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == toolchains
    assert [line.split() for line in lines[4:6]] == [["toolchain", *toolchains], []]
    rule = f"expected {key}/TOOLCHAIN, got no toolchain out of {', '.join(toolchains)}"
    assert (rejected.exit_code, rejected.stderr) == (2, f"mlagen: key: {rule}\n")


@pytest.mark.parametrize("which", ["explain 0 1", "explain 1 0", "show 0", "show 0 --source"])
def test_a_damaged_kernel_is_not_shown(which: str, run: Run, cached: Cached) -> None:
    """Damage is an error with the reason and the path, wherever the kernel stands."""
    cubin = damage(cached.folders[0])

    result = run(
        "cache", *(cached.keys[int(word)] if word.isdigit() else word for word in which.split())
    )

    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith("mlagen: cache: kernel.cubin: expected sha256 ")
    assert result.stderr.endswith(f": {cubin.parent}\n")


def make_key(toolchain: str = NEWEST, **key_fields: str) -> CacheKey:
    """Return the key of a small kernel."""
    fields = {"family": "attend", "spec.arch": "sm_80", "spec.page_size": "64"} | {
        name.replace("__", "."): value for name, value in key_fields.items()
    }
    return CacheKey(tuple(fields.items()), toolchain)


def test_the_nearest_has_the_fewest_differences_and_was_used_last(tmp_path: Path) -> None:
    """Kernels of another family are not compared, and a damaged entry has no key."""
    page = "spec__page_size"
    old, young = make_key(**{page: "16"}), make_key(**{page: "32"})
    far, other = make_key(spec__arch="sm_90a", **{page: "16"}), make_key(family="combine")
    store = make_store(tmp_path)
    for age_s, key in ((0, far), (0, other), (7200, old), (3600, young)):
        store.find_or_build(key, lambda: make_build(toolchain=NEWEST))
        use(entry_folder(tmp_path, key), age_s=age_s, now=time.time())

    found = nearest_entry(make_key(), store.entries())

    assert found is not None
    assert (found[0].key, found[1]) == (young.digest, [("spec.page_size", "64", "32")])
    assert nearest_entry(make_key(family="nothing like it"), store.entries()) is None
    (entry_folder(tmp_path, young) / "manifest.json").unlink()
    (again,) = [each for each in store.entries() if each.key == young.digest]
    assert key_of_entry(again) is None
    # The toolchain counts only if the key does not accept the other one.
    assert differences(make_key("nvrtc-13"), make_key(NEWEST)) == []
    expected = [("toolchain", "nvrtc-13.0.88", NEWEST)]
    assert differences(make_key("nvrtc-13.0.88"), make_key(NEWEST)) == expected
