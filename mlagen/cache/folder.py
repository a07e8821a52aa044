"""Open folders of a store: what is checked is what is used, whatever its name leads to later.

A path is looked up again by every call, so that a folder swapped for a link between a check and its
use leads elsewhere. A handle stays with the folder that was checked, and all below is reached from
handle to handle without following a link.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import final

from mlagen.cache.files import (
    DamageError,
    Identity,
    identity_of,
    identity_of_status,
    is_gone,
    make_folder,
    read_with_status,
    write_new,
)
from mlagen.cache.layout import Layout
from mlagen.cache.trees import delete_tree, tree_size
from mlagen.cache.trust import require_trusted, require_trusted_link, untrusted_link

# O_PATH, because passing through a folder needs no permission to list it.
_PASSING = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LISTING = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

# What the gate checks besides the root and the folder of the layout, as far as it is there.
_CHECKED = ("e", "staging", "quarantine")


def open_layout(layout: Layout, *, makes: bool = False) -> Folder:
    """Open the folder of a layout once everything at its top is found to be trusted.

    Every access to a store begins here: reading, listing, writing and deleting. The root, the
    folder of the layout and those of its entries, staging and quarantine must be folders that no
    other user can change. The root alone may be reached over a symbolic link.

    Parameters
    ----------
    layout : Layout
        What to open.
    makes : bool
        Whether to make what is missing.

    Raises
    ------
    UntrustedError
        If others can change one of the folders, or one of them is a link.
    OSError
        If it is not there, or cannot be opened.
    """
    if makes:
        make_folder(layout.root, mode=layout.folder_mode)
    with Folder(_open_root(layout), str(layout.root).rstrip("/"), layout) as root:
        version = root.inner(layout.version.name, makes=makes)
    try:
        for name in _CHECKED:
            version.require_trusted(name)
    except BaseException:
        version.close()
        raise
    return version


def open_below(layout: Layout, *names: str, makes: bool = False) -> Folder:
    """Open a folder below that of a layout; the same checks hold for all that lead to it."""
    with open_layout(layout, makes=makes) as version:
        return version.below(*names, makes=makes)


def require_trusted_layout(layout: Layout) -> None:
    """Raise what :func:`open_layout` raises, unless it is that nothing is there."""
    with suppress(FileNotFoundError):
        open_layout(layout).close()


def _open_root(layout: Layout) -> int:
    try:
        return os.open(layout.root, _PASSING)
    except NotADirectoryError:
        status = os.lstat(layout.root)
        if not stat.S_ISLNK(status.st_mode):
            raise
    require_trusted_link(status, str(layout.root), layout)
    return os.open(layout.root, _PASSING & ~os.O_NOFOLLOW)


@final
class Folder:
    """A folder that is open and trusted; names are those of what lies in it.

    Making one takes over the descriptor, and raises :class:`UntrustedError` unless it is trusted.
    """

    __slots__ = ("_descriptor", "_status", "layout", "path")

    def __init__(self, descriptor: int, path: str, layout: Layout) -> None:
        self._descriptor, self.path, self.layout = descriptor, path, layout
        try:
            self._status = os.fstat(descriptor)
            require_trusted(self._status, path, layout)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._descriptor)

    @property
    def name(self) -> str:
        """Its own name."""
        return self.path.rpartition("/")[2]

    @property
    def identity(self) -> Identity:
        """Which folder it is."""
        return identity_of_status(self._status)

    def is_there(self) -> bool:
        """Whether its path still leads to it, and not to nothing or to another."""
        names = Path(self.path).relative_to(self.layout.version).parts
        try:
            with open_below(self.layout, *names) as now:
                return os.path.samestat(now._status, self._status)  # noqa: SLF001 - one of its own
        except OSError as error:
            if is_gone(error):
                return False
            raise

    def inner(self, name: str, *, makes: bool = False) -> Folder:
        """Open a folder in this one; a link in its place is not trusted."""
        try:
            descriptor = self._open(name, makes=makes)
        except NotADirectoryError:
            if stat.S_ISLNK(self.status_of(name).st_mode):
                raise untrusted_link(f"{self.path}/{name}") from None
            raise
        return Folder(descriptor, f"{self.path}/{name}", self.layout)

    def entry(self, name: str) -> Folder:
        """Open a folder in this one; anything else in its place is damage."""
        try:
            descriptor = self._open(name)
        except NotADirectoryError as error:
            raise DamageError(f"{name}: expected a folder, got another kind") from error
        return Folder(descriptor, f"{self.path}/{name}", self.layout)

    def below(self, *names: str, makes: bool = False) -> Folder:
        """Open a folder that lies deeper, through all that lead to it."""
        first, *rest = names
        folder = self.inner(first, makes=makes)
        for name in rest:
            with folder:
                folder = folder.inner(name, makes=makes)
        return folder

    def folders(self, is_wanted: Callable[[str], bool]) -> Iterator[Folder]:
        """Yield the folders in this one, in the order of their names; what is none is left out."""
        for name in sorted(filter(is_wanted, self.names())):
            with suppress(FileNotFoundError, NotADirectoryError):
                inner = self.inner(name)
                with inner:
                    yield inner

    def make(self, name: str) -> Folder:
        """Make a folder that must not exist yet, and open it."""
        os.mkdir(name, self.layout.folder_mode, dir_fd=self._descriptor)
        return self.inner(name)

    def names(self) -> list[str]:
        """Return the names of all that lies here; a folder that is gone has none."""
        try:
            descriptor = self._open_to_list()
        except FileNotFoundError:
            return []
        try:
            return os.listdir(descriptor)  # noqa: PTH208 - no path leads here
        except OSError as error:
            error.filename = self.path
            raise
        finally:
            os.close(descriptor)

    def status_of(self, name: str) -> os.stat_result:
        """Return the status of what has a name here; a link is not followed."""
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def identity_of(self, name: str) -> Identity | None:
        """Return which file or folder has a name here, or None if none does."""
        return identity_of(name, self._descriptor)

    def require_trusted(self, name: str) -> None:
        """Raise :class:`UntrustedError` if a folder or link here has that name and is not trusted.

        A regular file passes: it leads nowhere, and opening it as a folder fails.
        """
        with suppress(FileNotFoundError):
            status = self.status_of(name)
            if stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode):
                require_trusted(status, f"{self.path}/{name}", self.layout)

    def may_write(self) -> bool:
        """Whether this process may make something here."""
        return os.access(".", os.W_OK | os.X_OK, dir_fd=self._descriptor)

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return the content of a regular file that no other user can change."""
        return self.read_with_status(name, max_bytes=max_bytes)[0]

    def read_with_status(self, name: str, *, max_bytes: int) -> tuple[bytes, os.stat_result]:
        """Do the same, and return the status of the file too."""

        def check(status: os.stat_result) -> None:
            require_trusted(status, f"{self.path}/{name}", self.layout)

        try:
            return read_with_status(name, max_bytes=max_bytes, folder=self._descriptor, check=check)
        except OSError as error:
            error.filename = f"{self.path}/{name}"
            raise

    def write(self, name: str, content: bytes, *, waits: bool = True) -> None:
        """Write a file that must not exist yet."""
        mode = self.layout.file_mode
        write_new(name, content, mode=mode, waits=waits, folder=self._descriptor)

    def touch(self, name: str) -> None:
        """Set the times of a file to now."""
        os.utime(name, dir_fd=self._descriptor, follow_symlinks=False)

    def move(self, name: str, target: Folder, new_name: str) -> None:
        """Rename what has a name here into another folder; a link is moved as one."""
        here, there = self._descriptor, target._descriptor
        os.rename(name, new_name, src_dir_fd=here, dst_dir_fd=there)

    def sync(self) -> None:
        """Wait until the names in it are on the disk."""
        descriptor = self._open_to_list()
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove_file(self, name: str) -> None:
        """Delete a file or a link."""
        os.unlink(name, dir_fd=self._descriptor)

    def remove_empty(self, name: str) -> None:
        """Delete an empty folder."""
        os.rmdir(name, dir_fd=self._descriptor)

    def delete(self, name: str) -> None:
        """Delete a folder, a file or a link; what cannot be deleted stays for a later sweep."""
        delete_tree(name, self._descriptor)

    def size_of(self, name: str) -> int:
        """Return the bytes of the files below a name, as far as they can be seen."""
        return tree_size(name, self._descriptor)

    def _open(self, name: str, *, makes: bool = False) -> int:
        try:
            return os.open(name, _PASSING, dir_fd=self._descriptor)
        except FileNotFoundError as error:
            if not makes:
                error.filename = f"{self.path}/{name}"
                raise
        except OSError as error:
            error.filename = f"{self.path}/{name}"
            raise
        with suppress(FileExistsError):
            os.mkdir(name, self.layout.folder_mode, dir_fd=self._descriptor)
        return self._open(name)

    def _open_to_list(self) -> int:
        try:
            return os.open(".", _LISTING, dir_fd=self._descriptor)
        except OSError as error:
            error.filename = self.path
            raise
