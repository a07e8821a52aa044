"""The trust check of cache folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.cache.files import DamageError
from mlagen.cache.folder import open_below, require_trusted_layout
from mlagen.cache.layout import Layout
from mlagen.cache.trust import require_own_folder
from tests.cache.builds import entry_folder, make_build, make_key, make_store, opened

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


def test_folders_of_a_store_are_trusted(layout: Layout) -> None:
    """Every folder that a store creates is trusted."""
    require_trusted(layout)
    require_trusted(layout, entry_of(layout))


def test_missing_folders_are_accepted(tmp_path: Path) -> None:
    """A missing cache or entry raises no trust error."""
    require_trusted(Layout(tmp_path / "cache"))

    with pytest.raises(FileNotFoundError):
        require_trusted(Layout(tmp_path / "cache"), tmp_path / "cache/v1/e/ab/abc/nvrtc-13.5.37")


PLACES: dict[str, Callable[[Layout], Path]] = {
    "the root": lambda layout: layout.root,
    "the layout": lambda layout: layout.version,
    "the entries": lambda layout: layout.entries,
    "the staging": lambda layout: layout.staging,
    "the quarantine": lambda layout: layout.quarantine,
    "the shard": lambda layout: entry_of(layout).parents[1],
    "the key": lambda layout: entry_of(layout).parent,
    "the entry": entry_of,
}


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777], ids="{:04o}".format)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_folder_that_others_may_write_is_rejected(
    place: Callable[[Layout], Path], mode: int, layout: Layout
) -> None:
    """The error names the folder, the mode and the remedy."""
    folder = place(layout)
    folder.chmod(mode)

    with pytest.raises(PermissionError) as caught:
        require_trusted(layout, entry_of(layout))

    assert caught.value.filename == str(folder)
    assert caught.value.strerror == (
        f"mode {mode:04o}, which lets others write, at {folder} (chmod -R go-w {layout.root}, "
        "choose another folder, or set MLAGEN_TRUST_SHARED=1)"
    )


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o2755], ids="{:04o}".format)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_folder_that_others_may_read_is_trusted(
    place: Callable[[Layout], Path], mode: int, layout: Layout
) -> None:
    """Read permission for other users is accepted."""
    place(layout).chmod(mode)

    require_trusted(layout, entry_of(layout))


@pytest.mark.parametrize("mode", [0o720, 0o777])
def test_a_shared_layout_trusts_all(mode: int, layout: Layout) -> None:
    """A shared layout trusts every mode."""
    for place in PLACES.values():
        place(layout).chmod(mode)
    (entry_of(layout) / "manifest.json").chmod(0o666)
    shared = Layout(layout.root, is_shared=True)

    require_trusted(shared, entry_of(layout))
    with open_below(shared, *entry_of(layout).relative_to(layout.version).parts) as entry:
        assert entry.read("manifest.json", max_bytes=1 << 20)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_folder_of_another_user_is_not_trusted(
    place: Callable[[Layout], Path], layout: Layout
) -> None:
    """The mode does not matter: the owner can change it."""
    os.chown(place(layout), 65534, -1)

    with pytest.raises(PermissionError, match=f"a folder of user 65534 at {place(layout)} "):
        require_trusted(layout, entry_of(layout))


def test_a_folder_of_root_is_trusted(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of root are trusted; a user other than the owner is rejected."""
    monkeypatch.setattr(os, "geteuid", lambda: 4242)

    if os.getuid() == 0:
        require_trusted(layout, entry_of(layout))
    else:
        with pytest.raises(PermissionError, match=f"a folder of user {os.getuid()}"):
            require_trusted(layout)


@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("place", list(PLACES)[1:])
def test_a_link_inside_is_not_trusted(
    place: str, is_shared: bool, layout: Layout, tmp_path: Path
) -> None:
    """A link is rejected wherever it points; at the path of an entry it is damage."""
    layout = Layout(layout.root, is_shared)
    folder = PLACES[place](layout)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    entry = layout.key_folder(KEY.digest) / KEY.toolchain
    expected = DamageError if place == "the entry" else PermissionError

    with pytest.raises(expected):
        require_trusted(layout, entry)


def test_a_link_to_the_root_is_followed(layout: Layout, tmp_path: Path) -> None:
    """A link to the root is followed, and its target is checked."""
    (tmp_path / "link").symlink_to(layout.root)
    linked = Layout(tmp_path / "link")

    require_trusted(linked)
    layout.root.chmod(0o770)

    with pytest.raises(PermissionError, match="mode 0770"):
        require_trusted(linked)


def test_a_file_in_place_of_a_folder_is_rejected(layout: Layout) -> None:
    """A file at the path of an entry is damage, at the path of staging an error."""
    (layout.key_folder(KEY.digest) / "nvrtc-1.2.3").touch()
    layout.staging.rmdir()
    layout.staging.touch()

    require_trusted(layout, entry_of(layout))
    with pytest.raises(NotADirectoryError):
        open_below(layout, "staging", create=True)
    with pytest.raises(DamageError, match=r"^nvrtc-1\.2\.3: expected a folder, got another kind$"):
        require_trusted(layout, layout.key_folder(KEY.digest) / "nvrtc-1.2.3")


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


def test_the_caller_passes_the_advice(tmp_path: Path) -> None:
    """The caller passes the advice for a folder outside of a cache."""
    tmp_path.chmod(0o777)

    with pytest.raises(PermissionError) as caught:
        require_own_folder(tmp_path, advice="choose another MLAGEN_LOCK_DIR")

    assert caught.value.strerror == (
        f"mode 0777, which lets others write, at {tmp_path} (choose another MLAGEN_LOCK_DIR)"
    )
    tmp_path.chmod(0o700)
    require_own_folder(tmp_path, advice="none")
