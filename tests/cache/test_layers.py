"""Where a kernel is looked for, in which order, and what is said if it is nowhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.cache.key import CacheKey
from mlagen.cache.layers import REASONS
from mlagen.cache.store import KernelStore
from tests.cache import builds
from tests.cache.builds import CountedBuild, entry_folder, make_build, make_key, make_store, tree
from tests.faults.steps import warnings_in

KEY = make_key()
OLDER, NEWER = "nvrtc-13.4.92", "nvrtc-13.10.5"


def fill(folder: Path, name: str, *toolchains: str) -> Path:
    """Make a layer with the kernel as those compilers made it; return its root."""
    for toolchain in toolchains or (KEY.toolchain,):
        cubin = builds.CUBIN + f"{name} {toolchain}".encode()
        key = make_key(toolchain=toolchain)
        build = make_build(cubin, toolchain=toolchain)
        make_store(folder / name).find_or_build(key, lambda: build)  # noqa: B023 - called at once
    return folder / name / "cache"


def store_over(folder: Path, *layers: Path, packaged: tuple[Path, ...] = ()) -> KernelStore:
    """Return a store of its own above read-only layers and packages."""
    return KernelStore(
        folder / "cache",
        lock_dir=folder / "locks",
        lock_timeout_s=60,
        layers=layers,
        packaged=lambda: packaged,
    )


def test_the_first_that_has_it_serves_it(tmp_path: Path) -> None:
    """The own folder, then layers in their order, then packages."""
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
    """No copy, no lock, no note of the use: such a folder may lie in an image or on a server."""
    layer = fill(tmp_path, "layer")
    manifest = entry_folder(tmp_path / "layer", KEY) / "manifest.json"
    os.utime(manifest, (1, 1))
    before = tree(tmp_path)
    build = CountedBuild()

    entry = store_over(tmp_path, layer).find_or_build(KEY, build)

    assert build.calls == 0
    assert entry.path == manifest.parent
    assert manifest.stat().st_mtime == 1
    assert tree(tmp_path) == before


def test_a_damaged_layer_is_passed_by_and_stays_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one serves; one warning for each damaged entry, however often it is met."""
    first, second = fill(tmp_path, "first"), fill(tmp_path, "second")
    damaged = entry_folder(tmp_path / "first", KEY)
    (damaged / "kernel.cubin").write_bytes(b"\x7fELF damaged")
    before = tree(first)
    store = store_over(tmp_path, first, second)

    found = [store.look_up(KEY) for _ in range(3)]

    assert [look.layer for look in found] == [second] * 3
    assert tree(first) == before
    (warning,) = warnings_in(caplog)
    assert warning.startswith(f"cache: damaged entry passed by in {damaged}: kernel.cubin: ")


def _nothing(_: Path) -> None:
    pass


def _damage(folder: Path) -> None:
    fill(folder, "layer")
    os.truncate(entry_folder(folder / "layer", KEY) / "kernel.cubin", 3)


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
def test_a_miss_says_why(make: Callable[[Path], object], reason: str, tmp_path: Path) -> None:
    """The reason of the layer that has most to say, whichever it is."""
    make(tmp_path)

    found = store_over(tmp_path, tmp_path / "empty", tmp_path / "layer/cache").look_up(KEY)

    assert (found.entry, found.layer, found.reason) == (None, None, reason)


@pytest.mark.parametrize("order", [(OLDER, NEWER), (NEWER, OLDER)], ids=" before ".join)
def test_of_several_compilers_the_newest_serves_who_takes_any(
    order: tuple[str, str], tmp_path: Path
) -> None:
    """By number and not by letter: 13.10 came after 13.4; one of another major version never."""
    layer = fill(tmp_path, "layer", *order, "nvrtc-14.0.1", "nvrtc-12.9.86")
    store = store_over(tmp_path, layer)

    found = store.look_up(CacheKey(KEY.key_fields, "nvrtc-13"))
    none = store.look_up(CacheKey(KEY.key_fields, "nvrtc-15"))

    assert found.entry is not None
    assert found.entry.manifest.toolchain == NEWER
    assert (none.entry, none.reason) == (None, "other toolchain")


def test_a_damaged_newest_leaves_the_next(tmp_path: Path) -> None:
    """Whoever takes any compiler's kernel takes an older one that is sound."""
    layer = fill(tmp_path, "layer", OLDER, NEWER)
    os.truncate(entry_folder(tmp_path / "layer", make_key(toolchain=NEWER)) / "kernel.cubin", 3)

    found = store_over(tmp_path, layer).look_up(CacheKey(KEY.key_fields, "nvrtc-13"))

    assert found.entry is not None
    assert found.entry.manifest.toolchain == OLDER


def test_a_sound_layer_is_shadowed_by_nothing_that_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is damaged in the own folder is set aside, and the layer serves without a build."""
    store_over(tmp_path).find_or_build(KEY, make_build)
    os.truncate(entry_folder(tmp_path, KEY) / "manifest.json", 3)
    layer, build = fill(tmp_path, "layer"), CountedBuild()

    entry = store_over(tmp_path, layer).find_or_build(KEY, build)

    assert build.calls == 0
    assert entry.path == entry_folder(tmp_path / "layer", KEY)
    assert len(warnings_in(caplog)) == 1
    assert len(list((tmp_path / "cache/v1/quarantine").iterdir())) == 1


def test_packages_are_trusted_as_their_code_is(tmp_path: Path) -> None:
    """What pip installed may have any mode; a named layer may not."""
    package = fill(tmp_path, "package")
    package.chmod(0o777)

    as_package = store_over(tmp_path, packaged=(package,)).find(KEY)
    as_layer = store_over(tmp_path, package).find(KEY)

    assert as_package is not None
    assert as_layer is None
