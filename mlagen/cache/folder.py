"""A cache folder on the disk: opened once, checked, and used through its descriptor.

::

    v2/CACHEDIR.TAG
    v2/<kk>/<key>.<toolchain>    an entry; kk = the first two digits of the key
    v2/<kk>/.<random>.part       an entry being written

Every system call resolves a path again, so a folder swapped for a link between check and use
redirects it. Here the folder that was checked is the one that is used: names are relative to open
folders, and links are never followed. Nothing but files is ever deleted.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias, final

from mlagen.cache.file import (
    ENTRY_MAX_BYTES,
    HEAD_BYTES,
    DamageError,
    entry_name,
    manifest_bytes,
    parse_name,
)
from mlagen.cache.trust import (
    Rules,
    UntrustedError,
    is_foreign,
    is_gone,
    make_folder,
)

# Each change of the layout, of the file of an entry or of its manifest is another version: an older
# mlagen would take it for damage.
VERSION = "v2"
_OLD_VERSIONS = ("v1",)
_OLD_DEPTH = 12  # twice that of their deepest file

# A writer needs milliseconds; its temporary file is abandoned after this.
_ABANDONED_AFTER_S = 3600.0

# Where a folder is removed between its creation and its use.
_MORE_ATTEMPTS = 7

_START_BYTES = 8192  # has the manifest of a kernel

# O_PATH, because traversing a folder needs no permission to list it.
_TRAVERSE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

# Errors of a non-following, non-blocking open that mean damage rather than a read failure.
_DAMAGE = {
    errno.ELOOP: "a symbolic link",
    errno.ENXIO: "a socket",
    errno.EIO: "an input/output error",
}

_SHARD = re.compile(r"[0-9a-f]{2}")
_PART = re.compile(r"\.[0-9a-f]{16}\.part")
_TAG = "CACHEDIR.TAG"

# The signature is fixed by the Cache Directory Tagging Specification, bford.info/cachedir.
_TAG_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# This folder holds kernels that mlagen compiled. They can be compiled again.
"""

# Distinguishes a file from its successors of the same name.
Identity: TypeAlias = tuple[int, int, int]


def identity_of(status: os.stat_result) -> Identity:
    """Return the identity of the file with a status."""
    # With the time, because a new file may reuse the inode of one that was just deleted.
    return status.st_dev, status.st_ino, status.st_ctime_ns


@final
class Opened:
    """An open and trusted folder; names are relative to it.

    The constructor takes ownership of the descriptor, and raises :class:`UntrustedError` unless the
    folder is trusted.
    """

    __slots__ = ("_descriptor", "_place", "_rules", "path")

    def __init__(self, descriptor: int, path: str, rules: Rules) -> None:
        self._descriptor, self.path, self._rules = descriptor, path, rules
        try:
            status = os.fstat(descriptor)
            self._place = (status.st_dev, status.st_ino)
            rules.require_trusted(status, path)
        except BaseException:
            self._descriptor = -1
            os.close(descriptor)
            raise

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def __del__(self) -> None:
        with suppress(Exception):  # a daemon may have closed it, and use its number otherwise
            if self._descriptor >= 0 and self.is_intact():
                os.close(self._descriptor)

    def is_intact(self) -> bool:
        """Whether the descriptor is still of this folder, which was not deleted.

        Raises UntrustedError if it is, and other users can change the folder now.
        """
        try:
            status = os.fstat(self._descriptor)
        except OSError as error:
            if error.errno in {errno.EBADF, errno.ESTALE}:
                return False
            raise
        if (status.st_dev, status.st_ino) != self._place or not status.st_nlink:
            return False
        self._rules.require_trusted(status, self.path)
        return True

    def is_same_as(self, other: Opened) -> bool:
        """Whether another one is the same folder."""
        return self._place == other._place

    def child(self, name: str, *, create: bool = False) -> Opened:
        """Open a subfolder; a link is not trusted."""
        path = f"{self.path}/{name}"
        try:
            descriptor = os.open(name, _TRAVERSE, dir_fd=self._descriptor)
        except FileNotFoundError:
            if not create:
                raise
            with suppress(FileExistsError):
                os.mkdir(name, self._rules.folder_mode, dir_fd=self._descriptor)
            return self.child(name)
        except OSError as error:
            error.filename = path
            if isinstance(error, NotADirectoryError):
                with suppress(FileNotFoundError):
                    status = self.status_of(name)
                    if stat.S_ISLNK(status.st_mode):
                        self._rules.require_trusted(status, path)
            raise
        return Opened(descriptor, path, self._rules)

    def names(self) -> list[str]:
        """Return the names in this folder, sorted; a deleted folder has none."""
        with self._listing() as descriptor:
            return sorted(os.listdir(descriptor))  # noqa: PTH208 - no path leads here

    def status_of(self, name: str) -> os.stat_result:
        """Return the status of a name in this folder; a link is not followed."""
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def may_write(self) -> bool:
        """Whether this process may create names in this folder."""
        return os.access(".", os.W_OK | os.X_OK, dir_fd=self._descriptor)

    def read(self, name: str, *, start_only: bool = False) -> tuple[bytes, os.stat_result]:
        """Return the content of an entry, or its beginning with the manifest, and its status.

        FIFOs and devices are not read and do not block. Raises FileNotFoundError if it is gone;
        DamageError if it is no regular file, or none of an entry; OSError if this process cannot
        read it, which is no proof of damage.
        """
        try:
            descriptor = os.open(name, _READ, dir_fd=self._descriptor)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise DamageError("expected a regular file, got another kind")
                self._rules.require_trusted(status, f"{self.path}/{name}")
                if status.st_size > ENTRY_MAX_BYTES:
                    raise DamageError(
                        f"expected at most {ENTRY_MAX_BYTES} bytes, got {status.st_size}"
                    )
                if not start_only:
                    return _read(descriptor, status.st_size), status
                start = _read(descriptor, min(status.st_size, _START_BYTES))
                missing = HEAD_BYTES + manifest_bytes(start) - len(start)
                return start + _read(descriptor, max(0, missing)), status
            finally:
                os.close(descriptor)
        except OSError as error:
            if found := _DAMAGE.get(error.errno or 0):
                raise DamageError(f"expected a regular file, got {found}") from error
            error.filename = f"{self.path}/{name}"
            raise

    def touch(self, name: str) -> None:
        """Set the times of a file to the current time."""
        os.utime(name, dir_fd=self._descriptor, follow_symlinks=False)

    def write(self, name: str, content: bytes) -> None:
        """Write a file that must not exist yet, and sync it; an error leaves none."""
        descriptor = os.open(name, _NEW, self._rules.file_mode, dir_fd=self._descriptor)
        try:
            try:
                rest = memoryview(content)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)  # a network file system may report a failed write here
        except BaseException:
            with suppress(OSError):
                self.unlink(name)
            raise

    def place(self, part: str, name: str) -> bool:
        """Give a written file its name; return False if there is an entry, which stays."""
        folder = self._descriptor
        try:
            os.link(part, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links: of two at once, the last one stays
            try:
                self.status_of(name)
            except FileNotFoundError:
                os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
                return True
            return False
        return True

    def unlink(self, name: str) -> None:
        """Delete a file, or a link itself."""
        os.unlink(name, dir_fd=self._descriptor)

    def sync(self) -> None:
        """Sync its names to the disk, as far as its file system can."""
        with suppress(OSError), self._listing() as descriptor:
            os.fsync(descriptor)

    def sweep(self, *, dry_run: bool = False) -> list[int]:
        """Delete the temporary files of dead writers that can be deleted; return their sizes."""
        swept = []
        for name in filter(_PART.fullmatch, self.names()):
            with suppress(OSError):
                status = self.status_of(name)
                # The absolute difference: a time far in the future comes from a clock set back.
                if abs(time.time() - status.st_mtime) > _ABANDONED_AFTER_S:
                    if not dry_run:
                        self.unlink(name)
                    swept.append(status.st_size)
        return swept

    def remove_folder(self, name: str) -> None:
        """Delete an empty subfolder."""
        os.rmdir(name, dir_fd=self._descriptor)

    def delete_tree(self, *, dry_run: bool, depth: int = _OLD_DEPTH) -> int:
        """Delete all that is in this folder, without following links; return the size of files.

        Raises OSError if something cannot be deleted, or folders are nested deeper than ``depth``.
        """
        if not depth:
            raise OSError(errno.ELOOP, "folders nested deeper than any of mlagen", self.path)
        freed = 0
        for name in self.names():
            with suppress(FileNotFoundError):
                status = self.status_of(name)
                if stat.S_ISDIR(status.st_mode):
                    with self.child(name) as child:
                        freed += child.delete_tree(dry_run=dry_run, depth=depth - 1)
                    if not dry_run:
                        self.remove_folder(name)
                else:
                    freed += status.st_size
                    if not dry_run:
                        self.unlink(name)
        return freed

    @contextmanager
    def _listing(self) -> Iterator[int]:
        """Open this folder for listing, which needs a permission of its own."""
        try:
            descriptor = os.open(".", _LIST, dir_fd=self._descriptor)
        except OSError as error:
            error.filename = self.path
            raise
        try:
            yield descriptor
        finally:
            os.close(descriptor)


@final
class Folder:
    """One cache folder, whether it exists or not.

    Every access starts with the open folder of the layout version: it and the root must be folders
    that no other user can change. Only the root may be a symbolic link.
    """

    def __init__(self, root: Path, *, is_shared: bool = False) -> None:
        self.root, self._rules = root, Rules(root, is_shared)
        self._held: Opened | None = None

    def path_of(self, key: str, toolchain: str) -> Path:
        """Return the path of an entry."""
        return self.root / VERSION / key[:2] / entry_name(key, toolchain)

    def require_writable(self) -> None:
        """Raise :class:`OSError` if publishing cannot succeed; passing does not guarantee it."""
        version = self._open(create=True)
        if not version.may_write():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), version.path)

    def shard(self, key: str) -> Opened:
        """Open the folder of the entries of a key, for a look-up.

        Only this method starts at the folder that was opened before, without its path.
        """
        held = self._held
        version = held if held is not None and held.is_intact() else self._open()
        return version.child(key[:2])

    def has_moved(self) -> bool:
        """Whether the path leads to another folder than the open one, which it is from now on.

        A miss has to ask: another process may have deleted the folder, and made it again.
        """
        held = self._held
        try:
            return held is not None and not held.is_same_as(self._open())
        except FileNotFoundError:
            return False

    def shards(self, prefix: str = "") -> Iterator[Opened]:
        """Yield the folders of entries whose key may begin with ``prefix``, in order."""
        try:
            version = self._open()
        except (FileNotFoundError, NotADirectoryError):
            return  # no cache yet
        for name in version.names():
            if _SHARD.fullmatch(name) and name.startswith(prefix[:2]):
                try:
                    shard = version.child(name)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                with shard:
                    yield shard

    def publish(
        self, key: str, toolchain: str, content: bytes, *, then: Callable[[Opened], object]
    ) -> bool:
        """Publish the file of an entry; return False if there is one, which stays.

        It is complete or absent at any moment: a process that dies leaves a temporary file only.
        ``then`` is called with the folder of the entry. Raises OSError if it cannot be written;
        nothing is visible then.
        """
        for _ in range(_MORE_ATTEMPTS):
            with suppress(FileNotFoundError):  # another process is deleting the folders
                return self._publish(entry_name(key, toolchain), content, then)
        return self._publish(entry_name(key, toolchain), content, then)

    def _publish(self, name: str, content: bytes, then: Callable[[Opened], object]) -> bool:
        version = self._open(create=True)
        with version.child(name[:2], create=True) as shard:
            part = f".{secrets.token_hex(8)}.part"
            shard.write(part, content)
            try:
                is_first = shard.place(part, name)
            finally:
                with suppress(OSError):  # renamed, or swept by a machine with another clock
                    shard.unlink(part)
            shard.sync()
            with suppress(OSError):
                version.write(_TAG, _TAG_TEXT)
            then(shard)
        return is_first

    def remove(self, key: str, toolchain: str, *, seen: Identity | None = None) -> bool:
        """Delete the file of an entry; return False if it is gone, or not the one ``seen``."""
        name = entry_name(key, toolchain)
        try:
            with self._open().child(name[:2]) as shard:
                if seen is not None and identity_of(shard.status_of(name)) != seen:
                    return False
                shard.unlink(name)
        except OSError as error:
            if is_gone(error):
                return False
            raise
        return True

    def remove_old_layouts(self, *, dry_run: bool = False) -> int:
        """Delete the folders of older layouts, which this version does not read; return the bytes.

        Raises OSError if other users can change one, or it cannot be deleted.
        """
        freed = 0
        with suppress(FileNotFoundError), self._open_root() as root:
            for name in _OLD_VERSIONS:
                with suppress(FileNotFoundError):
                    with root.child(name) as old:
                        freed += old.delete_tree(dry_run=dry_run)
                    if not dry_run:
                        root.remove_folder(name)
        return freed

    def _open(self, *, create: bool = False) -> Opened:
        """Return the open folder of the layout version, after all checks."""
        if create:
            make_folder(self.root, mode=self._rules.folder_mode)
        self._held = None
        with self._open_root() as root:
            self._held = version = root.child(VERSION, create=create)
        return version

    def _open_root(self) -> Opened:
        path = str(self.root).rstrip("/")
        try:
            descriptor = os.open(self.root, _TRAVERSE)
        except NotADirectoryError:
            status = os.lstat(self.root)
            if not stat.S_ISLNK(status.st_mode):
                raise
            if not self._rules.is_shared and is_foreign(status):
                text = f"a symbolic link of user {status.st_uid} at {path}"
                raise UntrustedError(text, path, "choose another folder") from None
            descriptor = os.open(self.root, _TRAVERSE & ~os.O_NOFOLLOW)
        return Opened(descriptor, path, self._rules)


def is_entry(name: str, prefix: str = "") -> bool:
    """Whether a name in a shard is of an entry whose key begins with ``prefix``."""
    return name.startswith(prefix) and parse_name(name) is not None


def _read(descriptor: int, size: int) -> bytes:
    content = b""
    while missing := size - len(content):
        # Bounded by the size of the file: os.read allocates the requested size up front.
        part = os.read(descriptor, missing)
        if not part:
            break  # truncated meanwhile: its sizes do not match
        content = content + part if content else part
    return content
