"""Layered look-up: search order, the reasons of a miss, and damaged or invalid layers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.cache.key import CacheKey
from mlagen.cache.layers import REASONS
from mlagen.cache.store import KernelStore
from tests.cache import builds
from tests.cache.builds import CountedBuild, cut, entry_path, make_build, make_key, make_store, tree
from tests.faults.steps import KEY, ask, store_in, warnings_in, whole_entries
from tests.fixture_types import Log

OLDER, NEWER = "nvrtc-13.4.92", "nvrtc-13.10.5"


def fill(folder: Path, name: str, *toolchains: str) -> Path:
    """Create a layer with the kernel for these toolchains; return its root."""
    for toolchain in toolchains or (KEY.toolchain,):
        cubin = builds.CUBIN + f"{name} {toolchain}".encode()
        key = make_key(toolchain=toolchain)
        build = make_build(cubin, toolchain=toolchain)
        make_store(folder / name).find_or_build(key, lambda: build)  # noqa: B023 - called at once
    return folder / name / "cache"


def store_over(folder: Path, *layers: Path, packaged: tuple[Path, ...] = ()) -> KernelStore:
    """Return a store above read-only layers and packages."""
    return KernelStore(
        folder / "cache",
        lock_dir=folder / "locks",
        lock_timeout_s=60,
        layers=layers,
        packaged=lambda: packaged,
    )


def test_the_first_layer_with_the_kernel_serves_it(tmp_path: Path) -> None:
    """The search order is own folder, layers in their order, packages."""
    first, second, package = (fill(tmp_path, name) for name in ("first", "second", "package"))
    empty = tmp_path / "empty"

    def place(*layers: Path) -> Path | None:
        return store_over(tmp_path, *layers, packaged=(package,)).look_up(KEY).layer

    places = [place(empty, first, second), place(empty, second), place(empty)]
    store_over(tmp_path).find_or_build(KEY, make_build)

    assert places == [first, second, package]
    assert place(first) == tmp_path / "cache"
    assert not empty.exists()


def test_a_hit_in_a_layer_writes_nothing_anywhere(tmp_path: Path) -> None:
    """A hit in a layer makes no copy, takes no lock, records no use: a layer may be read-only."""
    layer = fill(tmp_path, "layer")
    path = entry_path(tmp_path / "layer", KEY)
    os.utime(path, (1, 1))
    before = tree(tmp_path)
    build = CountedBuild()

    entry = store_over(tmp_path, layer).find_or_build(KEY, build)

    assert build.calls == 0
    assert entry.path == path
    assert path.stat().st_mtime == 1
    assert tree(tmp_path) == before


def _nothing(_: Path) -> None:
    pass


def _damage(folder: Path) -> None:
    fill(folder, "layer")
    cut(entry_path(folder / "layer", KEY))


def _open_to_all(folder: Path) -> None:
    fill(folder, "layer").chmod(0o777)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_nothing, "absent"),
        (lambda folder: fill(folder, "layer", OLDER), "other toolchain"),
        (_open_to_all, "unreadable"),
        (_damage, "damaged"),
    ],
    ids=REASONS,
)
def test_a_miss_has_a_reason(make: Callable[[Path], object], reason: str, tmp_path: Path) -> None:
    """The most informative reason of all layers is reported."""
    make(tmp_path)
    found = store_over(tmp_path, tmp_path / "empty", tmp_path / "layer/cache").look_up(KEY)
    assert (found.entry, found.layer, found.reason) == (None, None, reason)


@pytest.mark.parametrize("order", [(OLDER, NEWER), (NEWER, OLDER)], ids=" before ".join)
def test_of_several_toolchains_the_newest_serves(order: tuple[str, str], tmp_path: Path) -> None:
    """Versions compare numerically: 13.10 is newer than 13.4; other major versions never match."""
    layer = fill(tmp_path, "layer", *order, "nvrtc-14.0.1", "nvrtc-12.9.86")
    store = store_over(tmp_path, layer)
    found = store.look_up(CacheKey(KEY.key_fields, "nvrtc-13"))
    none = store.look_up(CacheKey(KEY.key_fields, "nvrtc-15"))
    assert found.entry is not None
    assert found.entry.manifest.toolchain == NEWER
    assert (none.entry, none.reason) == (None, "other toolchain")


def test_a_damaged_newest_entry_falls_back_to_the_next(tmp_path: Path) -> None:
    """If any toolchain is accepted, an older valid entry replaces a damaged newer one."""
    layer = fill(tmp_path, "layer", OLDER, NEWER)
    cut(entry_path(tmp_path / "layer", make_key(toolchain=NEWER)))
    found = store_over(tmp_path, layer).look_up(CacheKey(KEY.key_fields, "nvrtc-13"))
    assert found.entry is not None
    assert found.entry.manifest.toolchain == OLDER


def test_a_damaged_entry_does_not_shadow_a_valid_layer(tmp_path: Path, caplog: Log) -> None:
    """A damaged entry in the own folder is deleted, and the layer serves without a build."""
    store_over(tmp_path).find_or_build(KEY, make_build)
    cut(entry_path(tmp_path, KEY))
    layer, build = fill(tmp_path, "layer"), CountedBuild()
    entry = store_over(tmp_path, layer).find_or_build(KEY, build)
    assert build.calls == 0
    assert entry.path == entry_path(tmp_path / "layer", KEY)
    assert len(warnings_in(caplog)) == 1
    assert not entry_path(tmp_path, KEY).exists()


def test_packages_are_trusted_like_their_code(tmp_path: Path) -> None:
    """Packages are trusted with any mode, a configured layer is not."""
    package = fill(tmp_path, "package")
    package.chmod(0o777)
    as_package = store_over(tmp_path, packaged=(package,)).find(KEY)
    as_layer = store_over(tmp_path, package).find(KEY)
    assert as_package is not None
    assert as_layer is None


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
    damage(entry_path(folder, KEY))
    return folder / "cache"


def become(kind: Callable[[Path], object], path: Path) -> None:
    """Replace a file or a folder by something else."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    kind(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": cut,
    "empty": lambda entry: os.truncate(entry, 0),
    "a FIFO": lambda entry: become(os.mkfifo, entry),
    "a link": lambda entry: become(lambda path: path.symlink_to("nowhere"), entry),
    "a folder": lambda entry: become(Path.mkdir, entry),
    "folder of the key a file": lambda entry: become(Path.touch, entry.parent),
    "folder of the layout a file": lambda entry: become(Path.touch, entry.parents[1]),
}


@pytest.mark.timeout(15)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_layer_is_ignored(
    damage: Callable[[Path], object], tmp_path: Path, caplog: Log
) -> None:
    """The kernel is built into the cache, the layer is unchanged, and one warning names it."""
    layer = layer_with(damage, tmp_path / "layer")
    is_entry = os.path.lexists(entry_path(tmp_path / "layer", KEY))
    before = contents(layer)
    store, build = store_in(tmp_path, layers=[layer]), CountedBuild()
    caplog.clear()

    looks = [store.look_up(KEY) for _ in range(3)]
    entry = store.find_or_build(KEY, build)

    assert [look.entry for look in looks] == [None] * 3
    assert entry.cubin == builds.CUBIN
    assert entry.path == entry_path(tmp_path, KEY)
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
