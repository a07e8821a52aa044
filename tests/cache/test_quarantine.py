"""Removal of entries: quarantine, deletion, sweep."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.cache import quarantine
from mlagen.cache.files import identity_of
from mlagen.cache.layout import Layout
from tests.cache.builds import failing, tree
from tests.fixture_types import Patch

KEY = "ab" * 32


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """Return the layout of a cache that does not exist yet."""
    return Layout(tmp_path / "cache")


@pytest.fixture
def entry(layout: Layout) -> Path:
    """Return the folder of an entry."""
    folder = layout.entry(KEY, "nvrtc-13.5.37")
    folder.mkdir(parents=True)
    (folder / "kernel.cubin").write_bytes(b"bytes")
    return folder


def test_quarantine_keeps_the_entry_and_the_reason(layout: Layout, entry: Path) -> None:
    """The whole entry is moved, beside a report with reason, time and process."""
    cell = quarantine.quarantine_entry(layout, entry, "kernel.cubin: bad", seen=identity_of(entry))
    assert cell is not None
    assert cell.parent == layout.quarantine
    assert cell.name.startswith(f"{KEY}.")
    assert tree(cell) == ["entry", "entry/kernel.cubin", "reason.json"]
    report = json.loads((cell / "reason.json").read_text())
    assert (report["key"], report["toolchain"]) == (KEY, "nvrtc-13.5.37")
    assert (report["reason"], report["pid"]) == ("kernel.cubin: bad", os.getpid())
    assert not entry.exists()


def _replaced(entry: Path) -> None:
    entry.rename(entry.with_name("old"))
    entry.mkdir()


@pytest.mark.parametrize(
    "change",
    [_replaced, lambda entry: entry.rename(entry.with_name("old"))],
    ids=["replaced", "gone"],
)
def test_quarantine_spares_a_replaced_entry(
    change: Callable[[Path], object], layout: Layout, entry: Path
) -> None:
    """A process that finds damage late does not move the rebuilt entry."""
    seen = identity_of(entry)
    change(entry)
    before = tree(layout.entries)
    cell = quarantine.quarantine_entry(layout, entry, "kernel.cubin: bad", seen=seen)
    assert cell is None
    assert tree(layout.entries) == before
    assert tree(layout.quarantine) == []


def test_quarantine_spares_an_entry_replaced_at_the_last_moment(
    layout: Layout, entry: Path, monkeypatch: Patch
) -> None:
    """The identity is compared again once the cell is made, and the empty cell is deleted."""
    seen, real = identity_of(entry), os.mkdir

    def mkdir(name: str, *args: int, **kwargs: int) -> None:
        real(name, *args, **kwargs)
        if name.startswith(KEY):
            monkeypatch.undo()
            _replaced(entry)

    monkeypatch.setattr(os, "mkdir", mkdir)

    cell = quarantine.quarantine_entry(layout, entry, "kernel.cubin: bad", seen=seen)

    assert cell is None
    assert identity_of(entry) not in {None, seen}
    assert tree(layout.quarantine) == []


def test_quarantine_that_fails_leaves_no_cell(
    layout: Layout, entry: Path, monkeypatch: Patch
) -> None:
    """If the entry cannot be moved, the error is raised and no empty cell stays."""
    monkeypatch.setattr(os, "rename", failing(errno.EROFS))
    with pytest.raises(OSError, match="Read-only"):
        quarantine.quarantine_entry(layout, entry, "bad", seen=identity_of(entry))
    assert tree(layout.quarantine) == []


@pytest.mark.parametrize(
    ("max_cells", "max_bytes", "kept"),
    [(2, 100, [3, 4]), (20, 25, [3, 4]), (20, 9, [4]), (4, 40, [1, 2, 3, 4])],
    ids=["too many", "too large", "the newest too large", "at the limits"],
)
def test_the_oldest_cells_are_deleted_first(
    max_cells: int, max_bytes: int, kept: list[int], layout: Layout, monkeypatch: Patch
) -> None:
    """The newest cells within both limits stay, and the newest one whatever its size."""
    monkeypatch.setattr(quarantine, "QUARANTINE_MAX_CELLS", max_cells)
    monkeypatch.setattr(quarantine, "QUARANTINE_MAX_BYTES", max_bytes)
    for moment in (2, 4, 1, 3):
        cell = layout.quarantine / f"{KEY}.{moment}.7"
        cell.mkdir(parents=True)
        (cell / "reason.json").write_bytes(bytes(10))
    deleted = quarantine.limit_quarantine(layout)
    assert deleted == 4 - len(kept)
    assert sorted(int(cell.name.split(".")[1]) for cell in layout.quarantine.iterdir()) == kept


def test_remove_does_not_follow_a_link(layout: Layout, tmp_path: Path) -> None:
    """The link is removed, its target stays."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").touch()
    layout.entries.mkdir(parents=True)
    (layout.entries / "link").symlink_to(tmp_path / "precious")
    quarantine.remove(layout, layout.entries / "link")
    assert tree(tmp_path / "precious") == ["file"]
    assert tree(layout.entries) == tree(layout.staging) == []


def test_sweep_deletes_what_is_abandoned_and_nothing_else(layout: Layout) -> None:
    """Old staging and trash of other hosts are deleted; recent or live ones stay."""
    layout.staging.mkdir(parents=True)
    own = f"{os.uname().nodename}.{os.getpid()}"
    ages = {
        f"{KEY}.elsewhere.1.aa": 4000,
        "trash.elsewhere.1.bb": 4000,
        f"{KEY}.elsewhere.2.cc": 10,
        f"{KEY}.{own}.dd": 4000,
    }
    for name, age_s in ages.items():
        (layout.staging / name).mkdir()
        (layout.staging / name / "kernel.cubin").touch()
        os.utime(layout.staging / name, (time.time() - age_s,) * 2)

    swept = quarantine.sweep(layout)

    assert swept == 2
    remaining = [path.name for path in layout.staging.iterdir()]
    assert sorted(remaining) == sorted([f"{KEY}.elsewhere.2.cc", f"{KEY}.{own}.dd"])
