"""The limit: the least recently used give way, readers never, and the count is cheap."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mlagen.cache import eviction
from mlagen.cache.eviction import evict, limit, renew, weights
from mlagen.cache.layout import Layout
from mlagen.monitoring import metrics
from tests.cache.builds import (
    CUBIN,
    entry_folder,
    full_path,
    make_build,
    make_key,
    make_store,
    opened,
    tree,
)
from tests.faults.steps import store_in

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
    """Have an entry used that long ago."""
    used = time.time() - age_s
    os.utime(entry_folder(folder, KEYS[number]) / "manifest.json", (used, used))


def size_of(layout: Layout) -> int:
    """Return what all entries take, counted file by file."""
    return sum(file.stat().st_size for file in layout.entries.rglob("*") if file.is_file())


def left(folder: Path) -> list[int]:
    """Return the numbers of the entries that are there."""
    return [number for number, key in enumerate(KEYS) if entry_folder(folder, key).exists()]


def test_weights_are_what_lies_there(layout: Layout, tmp_path: Path) -> None:
    """Each entry with the size of its files and its last use; nothing is read."""
    weighed = {weight.path: weight for weight in weights(layout)}

    assert set(weighed) == {entry_folder(tmp_path, key) for key in KEYS}
    assert sum(weight.size_bytes for weight in weighed.values()) == size_of(layout)
    for number, key in enumerate(KEYS):
        age_s = time.time() - weighed[entry_folder(tmp_path, key)].used
        assert age_s == pytest.approx(HOUR_S * (10 - number), abs=60)


def test_the_least_recently_used_go_first(layout: Layout, tmp_path: Path) -> None:
    """As many as it takes to come down to nine tenths of the limit."""
    size = size_of(layout) // 10
    before = metrics()["evicted"]

    evicted = evict(layout, size * 6)

    assert [weight.path for weight in evicted] == [entry_folder(tmp_path, key) for key in KEYS[:5]]
    assert left(tmp_path) == [5, 6, 7, 8, 9]
    assert size_of(layout) <= size * 6 * 0.9
    assert metrics()["evicted"] == before + 5
    assert tree(layout.staging) == []


def test_folders_of_keys_go_with_their_last_entry(layout: Layout, tmp_path: Path) -> None:
    """Nothing empty is left of a key, and another compiler's entry keeps its folder."""
    other = make_key("family 0", toolchain="nvrtc-12.8.1")
    make_store(tmp_path).find_or_build(other, lambda: make_build(toolchain="nvrtc-12.8.1"))

    evict(layout, 1)

    assert [path for path in layout.entries.glob("*/*") if not any(path.iterdir())] == []
    assert entry_folder(tmp_path, other).exists()
    assert left(tmp_path) == []


def test_nothing_goes_while_all_of_it_fits(layout: Layout, tmp_path: Path) -> None:
    """Between the limit and nine tenths of it, too."""
    evicted = evict(layout, size_of(layout))

    assert evicted == []
    assert left(tmp_path) == list(range(10))


def test_what_was_used_a_moment_ago_stays(layout: Layout, tmp_path: Path) -> None:
    """Somebody may be between its manifest and its code, even if nothing fits."""
    for number in (0, 4):
        set_age(tmp_path, number, 60.0)

    evict(layout, 1)

    assert left(tmp_path) == [0, 4]


def test_entries_without_a_manifest_go_first(layout: Layout, tmp_path: Path) -> None:
    """Nothing says that they were ever used."""
    (entry_folder(tmp_path, KEYS[9]) / "manifest.json").unlink()

    evicted = evict(layout, size_of(layout) - 1)

    assert evicted[0].path == entry_folder(tmp_path, KEYS[9])


def test_an_entry_that_cannot_be_moved_is_no_end(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next ones go instead."""
    stuck, rename = entry_folder(tmp_path, KEYS[0]), os.rename

    def reject(name: str, new: str, **folders: int) -> None:
        if full_path(name, folders.get("src_dir_fd")) == stuck:
            raise PermissionError(13, "Permission denied")
        rename(name, new, **folders)

    monkeypatch.setattr(os, "rename", reject)

    evicted = evict(layout, size_of(layout) // 2)

    assert stuck not in {weight.path for weight in evicted}
    assert left(tmp_path) == [0, 7, 8, 9]


def test_an_empty_cache_is_not_made(tmp_path: Path) -> None:
    """Where nothing is, nothing is evicted and nothing written."""
    assert evict(Layout(tmp_path / "cache"), 1) == []
    assert tree(tmp_path) == []


@pytest.mark.parametrize(
    ("age_s", "is_renewed"),
    [(10.0, False), (HOUR_S - 60, False), (HOUR_S + 60, True), (-HOUR_S - 60, True)],
    ids=["just now", "within the hour", "more than an hour ago", "in the future"],
)
def test_a_use_is_noted_once_an_hour(
    age_s: float, is_renewed: bool, layout: Layout, tmp_path: Path
) -> None:
    """A hit in between changes nothing on the disk; the content is never touched."""
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
def test_a_use_that_cannot_be_noted_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is read-only, or an entry that is gone, is no error."""

    def reject(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", reject)

    folder = entry_folder(tmp_path, KEYS[0])
    with opened(folder) as entry:
        renew(entry)
        folder.rename(tmp_path / "elsewhere")
        renew(entry)
    (tmp_path / "elsewhere").rename(folder)

    assert left(tmp_path) == list(range(10))


def test_a_use_saves_an_entry(layout: Layout, tmp_path: Path) -> None:
    """The one used longest ago is found once, and outlives the others."""
    assert make_store(tmp_path).find(KEYS[0]) is not None

    evict(layout, size_of(layout) // 10 * 3)

    assert left(tmp_path) == [0, 9]


def test_publications_are_counted_without_looking(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the hour, and below the limit, the note is added up and nothing is listed."""
    evict(layout, size_of(layout))
    counted = size_of(layout)
    monkeypatch.setattr(eviction, "weights", None)

    evicted = [limit(layout, 1000, counted + 5000) for _ in range(4)]

    assert evicted == [[]] * 4
    assert eviction._read_note(layout)[0] == counted + 4000


def test_a_count_above_the_limit_is_made_anew(layout: Layout, tmp_path: Path) -> None:
    """What others deleted meanwhile is not held against the cache."""
    eviction._write_note(layout, 10**9, time.time())

    evicted = limit(layout, 1000, size_of(layout) + 1)

    assert evicted == []
    assert left(tmp_path) == list(range(10))
    assert eviction._read_note(layout)[0] == size_of(layout)


def test_without_a_note_all_is_counted(layout: Layout) -> None:
    """A cache that an older version filled has none."""
    layout.size_note.unlink(missing_ok=True)

    limit(layout, 0, 1 << 30)

    assert eviction._read_note(layout)[0] == size_of(layout)


def test_a_note_that_cannot_be_written_leaves_nothing(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staging is empty afterwards, and nobody is told."""

    def reject(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", reject)

    evict(layout, 1 << 30)

    assert tree(layout.staging) == []


def test_a_store_keeps_its_limit(tmp_path: Path) -> None:
    """Publishing evicts by itself, the oldest first."""
    large = make_build(CUBIN * 20)
    store = store_in(tmp_path, max_bytes=5 * 20_000)

    for number, key in enumerate(KEYS):
        store.find_or_build(key, lambda: large)
        set_age(tmp_path, number, HOUR_S * (10 - number))

    # Manifests are not counted between two looks at all of it.
    assert 3 * 20_000 < size_of(Layout(tmp_path / "cache")) <= 6 * 20_000
    assert left(tmp_path) == list(range(10 - len(left(tmp_path)), 10))
