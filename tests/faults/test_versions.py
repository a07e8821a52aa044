"""Versions of mlagen and NVRTC that share a folder: each changes its own entries only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from mlagen import engine
from mlagen.cache import folder as folder_module
from mlagen.cache.store import kernel_store, verify
from mlagen.compiler import nvrtc as nvrtc_module
from mlagen.compiler.toolchain import Nvrtc, find_nvrtc, wanted_toolchain
from mlagen.engine import find_or_build
from mlagen.errors import ToolchainError
from mlagen.monitoring import metrics
from mlagen.spec.arch import Arch
from mlagen.spec.kernel import KernelSpec
from tests.cache import builds
from tests.cache.builds import (
    CountedBuild,
    make_build,
    make_key,
    make_store,
    tree,
)
from tests.faults.crowds import crowd
from tests.faults.steps import store_in, warnings_in, whole_entries
from tests.fixture_types import Log, Patch
from tests.kernels import COMBINE

NAMES = ("mla_sm80", "another", "a third")


@contextmanager
def next_version() -> Iterator[None]:
    """Simulate the next version of mlagen, which has another layout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_module, "VERSION", "v3")
        yield


def test_two_versions_of_mlagen_share_a_folder(tmp_path: Path, caplog: Log) -> None:
    """Each builds, finds, lists and cleans up its own kernels, in any order."""
    now, later = CountedBuild(), CountedBuild()
    for _ in range(2):
        for name in NAMES:
            make_store(tmp_path).find_or_build(make_key(name), now)
            with next_version():
                make_store(tmp_path).find_or_build(make_key(name), later)
    before = tree(tmp_path / "cache")

    with next_version():
        store = store_in(tmp_path)
        theirs = {stored.key for stored in store.entries()}
        found = [verify(stored) for stored in store.entries()]
        store.collect()
    ours = {stored.key for stored in store_in(tmp_path).entries()}
    store_in(tmp_path).collect()

    assert (now.calls, later.calls) == (3, 3)
    assert ours == theirs
    assert (len(ours), found) == (3, [None] * 3)
    assert tree(tmp_path / "cache") == before
    assert warnings_in(caplog) == []


@pytest.mark.timeout(60)
def test_two_concurrent_versions_do_not_affect_each_other(tmp_path: Path) -> None:
    """Four processes of each build, evict and clean up in one folder."""
    keys = [f"family {number}" for number in range(8)]

    def work(number: int) -> None:
        store = store_in(tmp_path, max_bytes=1)
        for name in keys[number:] + keys[:number]:
            key = make_key(name)
            cubin = builds.CUBIN + key.digest.encode()
            entry = store.find_or_build(key, lambda: make_build(cubin))  # noqa: B023
            assert entry.cubin == cubin
            store.collect()

    def work_as_a_version(number: int) -> None:
        if number % 2:
            with next_version():
                work(number)
        else:
            work(number)

    statuses = crowd(8, work_as_a_version)

    assert statuses == [0] * 8
    assert whole_entries(tmp_path) == 8
    with next_version():
        assert whole_entries(tmp_path) == 8
    assert list(tmp_path.glob("cache/*/*/.*")) == []


def test_clearing_one_layout_keeps_the_other(tmp_path: Path) -> None:
    """Clearing removes the entries of this version only."""
    make_store(tmp_path).find_or_build(make_key(), make_build)
    with next_version():
        make_store(tmp_path).find_or_build(make_key(), make_build)
    store_in(tmp_path).clear()
    assert whole_entries(tmp_path) == 0
    with next_version():
        assert whole_entries(tmp_path) == 1


class Upgraded:
    """The installed wheel of NVRTC, with another version in its metadata."""

    def __init__(self, real: metadata.Distribution, version: str) -> None:
        self._real = real
        self.version = version
        self.files = real.files

    def locate_file(self, file: object) -> object:
        """Return the path of a listed file."""
        return self._real.locate_file(str(file))


@contextmanager
def nvrtc_of(version: str) -> Iterator[None]:
    """Simulate an installed NVRTC of that version, by metadata."""
    real = metadata.distribution
    installed = find_nvrtc().source
    if installed == "system":
        pytest.skip("the installed NVRTC comes from no wheel")

    def distribution(name: str) -> object:
        return Upgraded(real(name), version) if name == installed else real(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "distribution", distribution)
        find_nvrtc.cache_clear()
        wanted_toolchain.cache_clear()
        try:
            yield
        finally:
            find_nvrtc.cache_clear()
            wanted_toolchain.cache_clear()


def test_a_patch_of_nvrtc_compiles_new_kernels_and_keeps_the_old(
    monkeypatch: Patch, caplog: Log
) -> None:
    """13.4.59 and 13.4.92 have the same options and keys, and separate entries."""

    def build(spec: KernelSpec, nvrtc: Nvrtc, *_: object) -> object:
        assert spec == COMBINE
        return make_build(builds.CUBIN + str(nvrtc).encode(), toolchain=str(nvrtc))

    monkeypatch.setattr(engine, "build_spec", build)
    before = metrics()["misses.other_toolchain"]
    outcomes = []

    for version in ("13.4.59", "13.4.92", "13.4.59", "13.4.92"):
        with nvrtc_of(version):
            outcomes.append(find_or_build(COMBINE))

    assert [outcome.built for outcome in outcomes] == [True, True, False, False]
    assert metrics()["misses.other_toolchain"] == before + 1
    assert outcomes[1].entry.manifest.created["because"] == "other toolchain"
    made_by = [outcome.entry.cubin[len(builds.CUBIN) :].decode() for outcome in outcomes]
    assert made_by == ["nvrtc-13.4.59", "nvrtc-13.4.92"] * 2
    assert len({outcome.entry.manifest.key for outcome in outcomes}) == 1
    assert [stored.toolchain for stored in kernel_store().entries()] == made_by[:2]
    assert warnings_in(caplog) == []


def test_a_library_that_differs_from_its_metadata_is_reported_once(caplog: Log) -> None:
    """The cache uses the version that compiled, with one warning per process."""
    nvrtc_module._warn.cache_clear()
    real = find_nvrtc()
    other = replace(COMBINE, head_dim_vo=128)

    declared = f"{real.version}99"  # with the same minor version, and so the same options

    with nvrtc_of(declared):
        outcomes = [find_or_build(spec) for spec in (COMBINE, other)]

    assert [outcome.entry.manifest.toolchain for outcome in outcomes] == [str(real)] * 2
    assert warnings_in(caplog) == [
        f"NVRTC: expected {declared} from {real.source}, but {real.version} compiled"
    ]
    assert [find_or_build(spec).built for spec in (COMBINE, other)] == [False, False]


def test_an_unknown_architecture_leaves_nothing(cache_dir: Path) -> None:
    """One message lists the supported ones; nothing remains, and other kernels work."""
    unknown = replace(COMBINE, arch=Arch(42))
    for _ in range(2):
        with pytest.raises(ToolchainError, match=r"^arch: NVRTC .* compiles for sm_.*, got sm_42$"):
            find_or_build(unknown)
    assert list(kernel_store().entries()) == []
    assert list(cache_dir.glob("v2/*/*")) == []
    assert find_or_build(COMBINE).built
