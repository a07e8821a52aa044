"""The size limit: LRU eviction, safe for readers, with a cheap size record."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from mlagen.cache import eviction
from mlagen.cache.eviction import enforce_limit, evict, mark_used
from mlagen.cache.layout import Layout
from mlagen.monitoring import metrics
from tests.cache.builds import (
    CUBIN,
    entry_folder,
    failing,
    full_path,
    make_build,
    make_key,
    make_store,
    opened,
    tree,
)
from tests.faults.steps import store_in
from tests.fixture_types import Patch

KEYS = [make_key(f"family {number}") for number in range(10)]
HOUR_S = 3600.0


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """Return the layout of a cache with ten entries, used ten hours ago, nine hours ago, ..."""
    store = make_store(tmp_path)
    for number, key in enumerate(KEYS):
        store.find_or_build(key, make_build)
        set_age(tmp_path, number, HOUR_S * (10 - number))
    return Layout(tmp_path / "cache")


def set_age(folder: Path, number: int, age_s: float) -> None:
    """Set the last use of an entry to that long ago."""
    used = time.time() - age_s
    os.utime(entry_folder(folder, KEYS[number]) / "manifest.json", (used, used))


def size_of(layout: Layout) -> int:
    """Return the total size of all entries, measured file by file."""
    return sum(file.stat().st_size for file in layout.entries.rglob("*") if file.is_file())


def remaining(folder: Path) -> list[int]:
    """Return the numbers of the existing entries."""
    return [number for number, key in enumerate(KEYS) if entry_folder(folder, key).exists()]


def test_the_least_recently_used_are_evicted_first(layout: Layout, tmp_path: Path) -> None:
    """Eviction stops at nine tenths of the limit."""
    size = size_of(layout) // 10
    before = metrics()["evicted"]
    evicted = evict(layout, size * 6)
    assert [usage.path for usage in evicted] == [entry_folder(tmp_path, key) for key in KEYS[:5]]
    assert remaining(tmp_path) == [5, 6, 7, 8, 9]
    assert size_of(layout) <= size * 6 * 0.9
    assert metrics()["evicted"] == before + 5
    assert tree(layout.staging) == []


def test_the_folder_of_a_key_is_removed_with_its_last_entry(layout: Layout, tmp_path: Path) -> None:
    """The folder of a key is removed with its last entry only."""
    other = make_key("family 0", toolchain="nvrtc-12.8.1")
    make_store(tmp_path).find_or_build(other, lambda: make_build(toolchain="nvrtc-12.8.1"))
    evict(layout, 1)
    assert [path for path in layout.entries.glob("*/*") if not any(path.iterdir())] == []
    assert entry_folder(tmp_path, other).exists()
    assert remaining(tmp_path) == []


def test_nothing_is_evicted_below_the_limit(layout: Layout, tmp_path: Path) -> None:
    """Nothing is evicted up to the limit."""
    evicted = evict(layout, size_of(layout))
    assert evicted == []
    assert remaining(tmp_path) == list(range(10))


def test_recently_used_entries_stay(layout: Layout, tmp_path: Path) -> None:
    """Recently used entries stay even above the limit, because a process may be reading them."""
    for number in (0, 4):
        set_age(tmp_path, number, 60.0)
    evict(layout, 1)
    assert remaining(tmp_path) == [0, 4]


def test_entries_without_a_manifest_are_evicted_first(layout: Layout, tmp_path: Path) -> None:
    """Entries without a manifest have no last use, and are evicted first."""
    (entry_folder(tmp_path, KEYS[9]) / "manifest.json").unlink()
    evicted = evict(layout, size_of(layout) - 1)
    assert evicted[0].path == entry_folder(tmp_path, KEYS[9])


def test_an_entry_that_cannot_be_moved_is_skipped(
    layout: Layout, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The next entries are evicted instead."""
    stuck, rename = entry_folder(tmp_path, KEYS[0]), os.rename

    def reject(name: str, new: str, **folders: int) -> None:
        if full_path(name, folders.get("src_dir_fd")) == stuck:
            raise PermissionError(13, "Permission denied")
        rename(name, new, **folders)

    monkeypatch.setattr(os, "rename", reject)

    evicted = evict(layout, size_of(layout) // 2)

    assert stuck not in {usage.path for usage in evicted}
    assert remaining(tmp_path) == [0, 7, 8, 9]


def test_a_limit_that_cannot_be_met_is_an_error(
    layout: Layout, tmp_path: Path, monkeypatch: Patch
) -> None:
    """If nothing can be removed, eviction raises; below the limit it does not try."""
    monkeypatch.setattr(os, "rename", failing(errno.EROFS))
    evict(layout, size_of(layout))
    with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
        evict(layout, size_of(layout) // 2)
    assert remaining(tmp_path) == list(range(10))


@pytest.mark.parametrize(
    ("age_s", "is_renewed"),
    [(10.0, False), (HOUR_S - 60, False), (HOUR_S + 60, True), (-HOUR_S - 60, True)],
    ids=["just now", "within the hour", "more than an hour ago", "in the future"],
)
def test_a_use_is_recorded_once_an_hour(
    age_s: float, is_renewed: bool, layout: Layout, tmp_path: Path
) -> None:
    """A hit within the hour changes nothing on the disk; the content is never changed."""
    set_age(tmp_path, 3, age_s)
    manifest = entry_folder(tmp_path, KEYS[3]) / "manifest.json"
    before, content = manifest.stat().st_mtime_ns, manifest.read_bytes()
    found = make_store(tmp_path).find(KEYS[3])
    assert found is not None
    assert layout.root.exists()
    assert (manifest.stat().st_mtime_ns != before) is is_renewed
    assert not is_renewed or manifest.stat().st_mtime == pytest.approx(time.time(), abs=60)
    assert manifest.read_bytes() == content


@pytest.mark.usefixtures("layout")
def test_a_use_that_cannot_be_recorded_is_ignored(tmp_path: Path, monkeypatch: Patch) -> None:
    """A read-only disk or a removed entry is no error."""
    monkeypatch.setattr(os, "utime", failing(errno.EROFS))
    folder = entry_folder(tmp_path, KEYS[0])
    with opened(folder) as entry:
        mark_used(entry)
        folder.rename(tmp_path / "elsewhere")
        mark_used(entry)
    (tmp_path / "elsewhere").rename(folder)
    assert remaining(tmp_path) == list(range(10))


def test_publications_are_counted_without_listing(layout: Layout, monkeypatch: Patch) -> None:
    """Within the hour and below the limit, the record is incremented and nothing is listed."""
    evict(layout, size_of(layout))
    counted = size_of(layout)
    monkeypatch.setattr(eviction, "entry_usages", None)
    evicted = [enforce_limit(layout, 1000, counted + 5000) for _ in range(4)]
    assert evicted == [[]] * 4
    assert eviction._read_size_file(layout)[0] == counted + 4000


def test_the_size_is_measured_before_an_eviction(layout: Layout, tmp_path: Path) -> None:
    """Deletions by other processes are counted before an eviction."""
    eviction._write_size_file(layout, 10**9, time.time())
    evicted = enforce_limit(layout, 1000, size_of(layout) + 1)
    assert evicted == []
    assert remaining(tmp_path) == list(range(10))
    assert eviction._read_size_file(layout)[0] == size_of(layout)


def test_a_size_file_that_cannot_be_written_is_ignored(layout: Layout, monkeypatch: Patch) -> None:
    """Staging is empty afterwards, and nothing is logged."""
    monkeypatch.setattr(os, "rename", failing(errno.ENOSPC))
    evict(layout, 1 << 30)
    assert tree(layout.staging) == []


def test_a_store_enforces_its_limit(tmp_path: Path) -> None:
    """Publishing evicts the least recently used entries."""
    large = make_build(CUBIN * 20)
    store = store_in(tmp_path, max_bytes=5 * 20_000)
    for number, key in enumerate(KEYS):
        store.find_or_build(key, lambda: large)
        set_age(tmp_path, number, HOUR_S * (10 - number))
    # Manifests are not counted between two measurements.
    assert 3 * 20_000 < size_of(Layout(tmp_path / "cache")) <= 6 * 20_000
    assert remaining(tmp_path) == list(range(10 - len(remaining(tmp_path)), 10))
