"""The trust check of cache folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlagen.cache.folder import open_below, require_trusted_layout
from mlagen.cache.layout import Layout
from tests.cache.builds import entry_folder, make_build, make_key, make_store, opened
from tests.faults.strangers import FOLDERS, folder_of
from tests.fixture_types import Patch

KEY = make_key()


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """Return the layout of a cache with one entry."""
    make_store(tmp_path).find_or_build(KEY, make_build)
    (tmp_path / "cache/v1/quarantine").mkdir(mode=0o700)
    return Layout(tmp_path / "cache")


def require_trusted(layout: Layout, entry: Path | None = None) -> None:
    """Open the layout, and the folders down to an entry."""
    require_trusted_layout(layout)
    if entry is not None:
        *above, toolchain = entry.relative_to(layout.version).parts
        with open_below(layout, *above) as key, key.entry(toolchain):
            pass


def entry_of(layout: Layout) -> Path:
    """Return the folder of its entry."""
    return entry_folder(layout.root.parent, KEY)


def test_missing_folders_are_accepted(tmp_path: Path) -> None:
    """A missing cache or entry raises no trust error."""
    require_trusted(Layout(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError):
        require_trusted(Layout(tmp_path / "cache"), tmp_path / "cache/v1/e/ab/abc/nvrtc-13.5.37")


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o2755], ids="{:04o}".format)
@pytest.mark.parametrize("place", FOLDERS)
def test_a_folder_that_others_may_read_is_trusted(
    place: str, mode: int, layout: Layout, tmp_path: Path
) -> None:
    """Read permission for other users is accepted."""
    folder_of(tmp_path, place).chmod(mode)
    require_trusted(layout, entry_of(layout))


def test_a_folder_of_root_is_trusted(layout: Layout, monkeypatch: Patch) -> None:
    """Folders of root are trusted; a user other than the owner is rejected."""
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    if os.getuid() == 0:
        require_trusted(layout, entry_of(layout))
    else:
        with pytest.raises(PermissionError, match=f"a folder of user {os.getuid()}"):
            require_trusted(layout)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666], ids="{:04o}".format)
def test_a_file_that_others_may_write_is_not_read(mode: int, layout: Layout) -> None:
    """The check uses the status of the opened file, and the error names it."""
    file = entry_of(layout) / "kernel.cubin"
    file.chmod(mode)
    expected = f"mode {mode:04o}, which lets others write, at {file} "
    with opened(file.parent) as entry, pytest.raises(PermissionError, match=expected):
        entry.read(file.name, max_bytes=1 << 20)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_a_file_of_another_user_is_not_read(layout: Layout) -> None:
    """A file of another user is rejected whatever its mode and folder."""
    file = entry_of(layout) / "kernel.cubin"
    os.chown(file, 65534, -1)
    expected = f"a file of user 65534 at {file} "
    with opened(file.parent) as entry, pytest.raises(PermissionError, match=expected):
        entry.read(file.name, max_bytes=1 << 20)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a link away")
def test_a_link_to_the_root_must_be_own(layout: Layout, tmp_path: Path) -> None:
    """A link to the root by another user is rejected, unless the cache is shared."""
    link = tmp_path / "link"
    link.symlink_to(layout.root)
    os.chown(link, 65534, -1, follow_symlinks=False)
    with pytest.raises(PermissionError, match=f"a symbolic link of user 65534 at {link} "):
        require_trusted(Layout(link))
    require_trusted(Layout(link, is_shared=True))
