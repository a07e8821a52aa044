"""Open folder handles: the checked folder is the used one, even if its path changes meanwhile.

Every system call resolves a path again, so a folder swapped for a link between check and use
redirects it (TOCTOU). A handle stays with the checked folder, and everything below is opened
relative to a handle without following links.
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

# O_PATH, because traversing a folder needs no permission to list it.
_PATH_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LIST_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

# Subfolders that `open_layout` checks, if they exist, besides the root and the version folder.
_TRUSTED_NAMES = ("e", "staging", "quarantine")


def open_layout(layout: Layout, *, create: bool = False) -> Folder:
    """Open the version folder of a layout after its top-level folders pass the trust check.

    Every access to a store starts here: reading, listing, writing and deleting. The root, the
    version folder and the folders of entries, staging and quarantine must be folders that no other
    user can change. Only the root may be a symbolic link.

    Parameters
    ----------
    layout : Layout
        The layout to open.
    create : bool
        Whether to create missing folders.

    Raises
    ------
    UntrustedError
        If other users can change one of the folders, or one of them is a link.
    OSError
        If it does not exist, or cannot be opened.
    """
    if create:
        make_folder(layout.root, mode=layout.folder_mode)
    with Folder(_open_root(layout), str(layout.root).rstrip("/"), layout) as root:
        version = root.child(layout.version.name, create=create)
    try:
        for name in _TRUSTED_NAMES:
            version.require_trusted(name)
    except BaseException:
        version.close()
        raise
    return version


def open_below(layout: Layout, *names: str, create: bool = False) -> Folder:
    """Open a folder below the version folder; every folder on the way passes the same checks."""
    with open_layout(layout, create=create) as version:
        return version.below(*names, create=create)


def require_trusted_layout(layout: Layout) -> None:
    """Raise the errors of :func:`open_layout`, except for a layout that does not exist."""
    with suppress(FileNotFoundError):
        open_layout(layout).close()


def _open_root(layout: Layout) -> int:
    try:
        return os.open(layout.root, _PATH_FLAGS)
    except NotADirectoryError:
        status = os.lstat(layout.root)
        if not stat.S_ISLNK(status.st_mode):
            raise
    require_trusted_link(status, str(layout.root), layout)
    return os.open(layout.root, _PATH_FLAGS & ~os.O_NOFOLLOW)


@final
class Folder:
    """An open and trusted folder; names are relative to it.

    The constructor takes ownership of the descriptor, and raises :class:`UntrustedError` unless the
    folder is trusted.
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
        """Close the descriptor."""
        os.close(self._descriptor)

    @property
    def name(self) -> str:
        """Its name."""
        return self.path.rpartition("/")[2]

    @property
    def identity(self) -> Identity:
        """Its identity."""
        return identity_of_status(self._status)

    def still_exists(self) -> bool:
        """Whether its path still resolves to this folder."""
        names = Path(self.path).relative_to(self.layout.version).parts
        try:
            with open_below(self.layout, *names) as now:
                return os.path.samestat(now._status, self._status)  # noqa: SLF001 - same class
        except OSError as error:
            if is_gone(error):
                return False
            raise

    def child(self, name: str, *, create: bool = False) -> Folder:
        """Open a subfolder; a link is not trusted."""
        try:
            descriptor = self._open(name, create=create)
        except NotADirectoryError:
            if stat.S_ISLNK(self.status_of(name).st_mode):
                raise untrusted_link(f"{self.path}/{name}") from None
            raise
        return Folder(descriptor, f"{self.path}/{name}", self.layout)

    def entry(self, name: str) -> Folder:
        """Open a subfolder; anything else than a folder is damage."""
        try:
            descriptor = self._open(name)
        except NotADirectoryError as error:
            raise DamageError(f"{name}: expected a folder, got another kind") from error
        return Folder(descriptor, f"{self.path}/{name}", self.layout)

    def below(self, *names: str, create: bool = False) -> Folder:
        """Open a nested folder through all folders on the way."""
        first, *rest = names
        folder = self.child(first, create=create)
        for name in rest:
            with folder:
                folder = folder.child(name, create=create)
        return folder

    def folders(self, is_wanted: Callable[[str], bool]) -> Iterator[Folder]:
        """Yield the wanted subfolders, sorted by name; anything else is skipped."""
        for name in sorted(filter(is_wanted, self.names())):
            with suppress(FileNotFoundError, NotADirectoryError):
                child = self.child(name)
                with child:
                    yield child

    def make(self, name: str) -> Folder:
        """Create a subfolder that must not exist yet, and open it."""
        os.mkdir(name, self.layout.folder_mode, dir_fd=self._descriptor)
        return self.child(name)

    def names(self) -> list[str]:
        """Return the names in this folder; a deleted folder has none."""
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
        """Return the status of a name in this folder; a link is not followed."""
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def identity_of(self, name: str) -> Identity | None:
        """Return the identity of a name in this folder, or None if it does not exist."""
        return identity_of(name, self._descriptor)

    def require_trusted(self, name: str) -> None:
        """Raise :class:`UntrustedError` if that name is an untrusted folder or link.

        A regular file passes: opening it as a folder fails later.
        """
        with suppress(FileNotFoundError):
            status = self.status_of(name)
            if stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode):
                require_trusted(status, f"{self.path}/{name}", self.layout)

    def may_write(self) -> bool:
        """Whether this process may create names in this folder."""
        return os.access(".", os.W_OK | os.X_OK, dir_fd=self._descriptor)

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return the content of a trusted regular file."""
        return self.read_with_status(name, max_bytes=max_bytes)[0]

    def read_with_status(self, name: str, *, max_bytes: int) -> tuple[bytes, os.stat_result]:
        """Do the same, and return the file status too."""

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
        """Set the times of a file to the current time."""
        os.utime(name, dir_fd=self._descriptor, follow_symlinks=False)

    def move(self, name: str, target: Folder, new_name: str) -> None:
        """Rename a name in this folder into another folder; a link itself is moved."""
        source, destination = self._descriptor, target._descriptor
        os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=destination)

    def sync(self) -> None:
        """Sync its directory entries to the disk."""
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
        """Delete a folder tree, a file or a link; undeletable items stay for a later sweep."""
        delete_tree(name, self._descriptor)

    def size_of(self, name: str) -> int:
        """Return the total size of the readable files below a name."""
        return tree_size(name, self._descriptor)

    def _open(self, name: str, *, create: bool = False) -> int:
        try:
            return os.open(name, _PATH_FLAGS, dir_fd=self._descriptor)
        except FileNotFoundError as error:
            if not create:
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
            return os.open(".", _LIST_FLAGS, dir_fd=self._descriptor)
        except OSError as error:
            error.filename = self.path
            raise
