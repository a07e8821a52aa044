"""What `mlagen cache rm`, `clear`, `prune` and `gc` remove, and what they keep."""

from __future__ import annotations

import os
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from cache_tools.tools.entries import matches_sources, matches_toolchain, required_toolchain
from mlagen.cache.store import kernel_store
from mlagen.codegen.sources import template_digests
from mlagen.engine import find_or_build
from tests.fixture_types import Patch

from .altered import move_to_layer, recast, snapshot, use
from .conftest import Cached, Setting, raising, run


def kept_in(cache_dir: Path) -> set[Path]:
    """Return the remaining entries."""
    return set((cache_dir / "v2").glob("*/*"))


def size_of(*paths: Path) -> int:
    """Return the size of these entries."""
    return sum(path.stat().st_size for path in paths)


def test_a_key_given_twice_is_removed_once(cached: Cached) -> None:
    """`rm` removes the entries of all compilers once, and the other kernels stay."""
    gone, kept = cached.paths
    other = recast(gone, toolchain="nvrtc-12.8.1", keeps=True)
    removed = run.json("cache rm", cached.keys[0], cached.keys[0][:6])["removed"]
    assert [entry["path"] for entry in removed] == [str(other), str(gone)]
    assert kept_in(cached.root) == {kept}


REMOVED, NOTHING = "removed 2 kernels from ", "no answer, nothing removed; --yes skips the question"


@pytest.mark.parametrize(
    ("options", "answer", "code", "last"),
    [
        *(("--yes", None, 0, REMOVED), ("", "y\n", 0, REMOVED)),
        *(("", "n\n", 1, "nothing removed"), ("", None, 130, NOTHING)),
        ("--json", "y\n", 0, '"removed": 2'),
    ],
)
def test_everything_is_removed_after_a_confirmation(
    options: str, answer: str | None, code: int, last: str, cached: Cached
) -> None:
    """The question of `clear` has count, size and folder; at the end of stdin it is no."""
    result = run("cache clear", *options.split(), answer=answer)
    assert result.exit_code == code
    assert last in "".join(result.stdout.splitlines()[-2:])
    assert len(kept_in(cached.root)) == (0 if code == 0 else 2)
    if options != "--yes":  # a document has stdout alone
        asked = result.stderr if options else result.stdout
        assert asked.startswith("Remove 2 kernels, ")
        assert f" from {cached.root}? [y/N] " in asked


@pytest.mark.parametrize(
    ("options", "gone", "why"),
    [
        ("--older-than 1h", 1, "unused"),
        ("--max-size SIZE", 1, "size"),
        ("--max-size 0", 2, "size"),
        ("--max-size 1G", 0, None),
        ("--family combine", 2, "named"),
        ("--arch sm_80", 2, "named"),
        ("--arch sm_80 --older-than 1h", 1, "unused"),
        ("--arch sm_90a --max-size 0", 0, None),
    ],
)
def test_only_selected_kernels_are_pruned(
    options: str, gone: int, why: str | None, cached: Cached
) -> None:
    """Age and size count from the last use; a dry run prints the same, and changes nothing."""
    old, young = cached.paths
    use(old, age_s=7200, now=time.time())
    before = snapshot(cached.root)
    words = ("cache", "prune", *options.replace("SIZE", str(size_of(young))).split())

    dry = run.json(*words, "--dry-run")
    text = run(*words, "--dry-run").stdout
    after = snapshot(cached.root)
    found = run.json(*words)

    removed = {Path(entry["path"]): entry["why"] for entry in found["removed"]}
    assert after == before
    assert dry == found | {"dry_run": True}
    assert text.splitlines()[-1].startswith(f"would remove {gone} kernel")
    assert removed == dict.fromkeys([old, young][:gone], why)
    assert found["freed_bytes"] == sum(entry["size_bytes"] for entry in found["removed"])
    assert (found["kept"], found["dry_run"]) == (2 - gone, False)
    assert found["kept_bytes"] == size_of(*kept_in(cached.root))
    assert kept_in(cached.root) == {old, young} - removed.keys()


@pytest.mark.parametrize(
    ("changes", "option", "why"),
    [
        ({"toolchain": "nvrtc-12.8.1"}, "--other-toolchains", "other toolchain"),
        ({"key_fields": {"templates": "0" * 64}}, "--other-versions", "other version"),
        ({"key_fields": {"codegen": "0"}}, "--other-versions", "other version"),
    ],
)
def test_kernels_of_another_installation_are_pruned(
    changes: dict[str, Any], option: str, why: str, cached: Cached
) -> None:
    """Those of the installed NVRTC and sources stay, and a damaged one, which has no version."""
    other = recast(cached.paths[0], keeps=True, **changes)
    cached.paths[1].write_text("{")
    found = run.json("cache prune", option)
    assert [(entry["path"], entry["why"]) for entry in found["removed"]] == [(str(other), why)]
    assert kept_in(cached.root) == set(cached.paths)


@pytest.mark.usefixtures("cached")
def test_entries_match_this_installation_or_do_not(setting: Setting, monkeypatch: Patch) -> None:
    """nvrtc-MAJOR accepts any of that version; without CUDA bindings there is no toolchain."""
    valid = next(kernel_store().entries())
    own = str(required_toolchain())

    assert matches_sources(valid, template_digests())
    assert not matches_sources(valid, {"0" * 64})
    toolchains = (own, own.partition(".")[0], "nvrtc-12.8.1", None)
    assert [matches_toolchain(valid, each) for each in toolchains] == [True, True, False, False]
    valid.path.write_text("{")
    (damaged,) = [each for each in kernel_store().entries() if each.key == valid.key]
    assert not matches_sources(damaged, template_digests())
    setting("MLAGEN_TOOLCHAIN", "compatible")
    monkeypatch.setattr(metadata, "version", raising(metadata.PackageNotFoundError()))
    assert required_toolchain() is None


def test_a_pruned_kernel_is_compiled_again(cached: Cached, monkeypatch: Patch) -> None:
    """Pruning costs a running job a compile; kernels of a layer are neither removed nor counted."""
    run("cache prune --max-size 0")
    outcome = find_or_build(cached.units[0].spec)
    kept = kept_in(cached.root)
    layer = move_to_layer(cached.root, monkeypatch)
    before = snapshot(layer)
    found = run.json("cache prune --max-size 0")
    assert outcome.built
    assert kept == {cached.paths[0]} == {outcome.entry.path}
    assert (found["removed"], found["kept"]) == ([], 0)
    assert snapshot(layer) == before


def test_gc_evicts_the_least_recently_used_above_a_limit(cached: Cached, setting: Setting) -> None:
    """Below the limit nothing changes; a recently used kernel stays, even above it."""
    old, young = cached.paths
    use(old, age_s=7200, now=time.time())
    before, size = snapshot(cached.root / "v2"), size_of(old)

    clean = run.json("cache gc")
    after = snapshot(cached.root / "v2")
    setting("MLAGEN_CACHE_MAX_SIZE", "1")
    found = run.json("cache gc")
    kept = kept_in(cached.root)
    use(young, age_s=7200, now=time.time())
    last = run.json("cache gc")

    counts = {"abandoned": 0, "evicted": [], "freed_bytes": 0}
    assert (clean, after) == ({"cache_dir": str(cached.root), **counts}, before)
    gone = [[Path(each["path"]) for each in result["evicted"]] for result in (found, last)]
    assert (gone, kept) == ([[old], [young]], {young})
    assert found["freed_bytes"] == size


def test_gc_deletes_abandoned_files(cached: Cached) -> None:
    """The file of a live process stays."""
    dead, alive = (cached.paths[0].with_name(f".{name * 16}.part") for name in "da")
    for path in (dead, alive):
        path.write_bytes(bytes(100))
    os.utime(dead, (time.time() - 7200,) * 2)
    assert run.json("cache stats")["abandoned"] == {"files": 1, "size_bytes": 100}
    assert run.json("cache gc")["abandoned"] == 1
    assert kept_in(cached.root) == {*cached.paths, alive}


def test_an_older_layout_is_pruned_with_other_versions(cached: Cached) -> None:
    """No other command touches it."""
    old = cached.root / "v1/e/ab"
    old.mkdir(parents=True, mode=0o700)
    (old / "kernel.cubin").write_bytes(bytes(5000))
    for words in ("cache gc", "cache prune --max-size 1G", "cache verify --remove"):
        assert run(words).exit_code == 0
    dry = run.json("cache prune --other-versions --dry-run")
    assert (dry["old_layout_bytes"], dry["freed_bytes"], old.exists()) == (5000, 5000, True)
    text = run("cache prune --other-versions").stdout
    assert text.startswith("v1, the folder of an older layout, 5 KiB\nremoved 0 kernels, 5 KiB")
    assert not (cached.root / "v1").exists()
    assert kept_in(cached.root) == set(cached.paths)
