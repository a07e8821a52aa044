"""Damaged read-only layers: ignored with one warning, never written, never trusted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cache import builds
from tests.cache.builds import CountedBuild, Log, entry_folder
from tests.faults.steps import KEY, ask, store_in, warnings_in, whole_entries


def contents(folder: Path) -> dict[str, bytes | None]:
    """Return the content of a folder, with modification times."""
    return {
        f"{path.relative_to(folder)} {path.lstat().st_mtime_ns}": (
            path.read_bytes() if path.is_file() else None
        )
        for path in folder.rglob("*")
    }


def layer_with(damage: Callable[[Path], object], folder: Path) -> Path:
    """Create a layer whose only entry is damaged, and return its root."""
    ask(folder)
    damage(entry_folder(folder, KEY))
    return folder / "cache"


def become(kind: Callable[[Path], object], path: Path) -> None:
    """Replace a file or a folder by something else."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    kind(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "code cut off": lambda entry: os.truncate(entry / "kernel.cubin", 63),
    "code missing": lambda entry: (entry / "kernel.cubin").rename(entry / "aside"),
    "manifest empty": lambda entry: os.truncate(entry / "manifest.json", 0),
    "manifest a FIFO": lambda entry: become(os.mkfifo, entry / "manifest.json"),
    "entry empty": lambda entry: become(Path.mkdir, entry),
    "entry a file": lambda entry: become(Path.touch, entry),
    "folder of the key a file": lambda entry: become(Path.touch, entry.parent),
    "folder of entries a file": lambda entry: become(Path.touch, entry.parents[2]),
}


@pytest.mark.timeout(15)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_layer_is_ignored(
    damage: Callable[[Path], object], tmp_path: Path, caplog: Log
) -> None:
    """The kernel is built into the cache, the layer is unchanged, and one warning names it."""
    layer = layer_with(damage, tmp_path / "layer")
    is_entry = entry_folder(tmp_path / "layer", KEY).exists()
    before = contents(layer)
    store, build = store_in(tmp_path, layers=[layer]), CountedBuild()
    caplog.clear()

    looks = [store.look_up(KEY) for _ in range(3)]
    entry = store.find_or_build(KEY, build)

    assert [look.entry for look in looks] == [None] * 3
    assert entry.cubin == builds.CUBIN
    assert entry.path == entry_folder(tmp_path, KEY)
    assert build.calls == 1
    warnings = warnings_in(caplog)
    assert len(warnings) == (1 if is_entry else 0)
    assert all(f"{layer}" in warning for warning in warnings)
    assert contents(layer) == before
    assert whole_entries(tmp_path) == 1


MISSING: dict[str, Callable[[Path], object]] = {
    "nothing": lambda _: None,
    "a file": Path.touch,
    "a FIFO": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path),
    "an empty folder": Path.mkdir,
}


@pytest.mark.timeout(15)
@pytest.mark.parametrize("make", MISSING.values(), ids=MISSING)
def test_an_invalid_layer_costs_a_warning_at_most(
    make: Callable[[Path], object], tmp_path: Path, caplog: Log
) -> None:
    """A layer that is unmounted or invalid counts as empty; the next layer serves."""
    make(tmp_path / "layer")
    ask(tmp_path / "valid")
    layers = [tmp_path / "layer", tmp_path / "valid/cache"]
    store = store_in(tmp_path, layers=layers)
    found = [store.look_up(KEY) for _ in range(2)]
    assert [look.layer for look in found] == [tmp_path / "valid/cache"] * 2
    assert len(warnings_in(caplog)) <= 1
