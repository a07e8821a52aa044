"""How an entry comes to be: written aside, then renamed into place in one step."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mlagen.cache.disposal import delete
from mlagen.cache.entry import MANIFEST, Manifest
from mlagen.cache.files import identity_of, make_folder, sync_folder, write_new
from mlagen.cache.layout import Layout
from mlagen.cache.trust import require_trusted, require_trusted_above

# How often the folder of a key may vanish between its making and the rename.
_MORE_ATTEMPTS = 15

# The signature is fixed by the Cache Directory Tagging Specification, bford.info/cachedir.
_TAG = b"""Signature: 8a477f597d28d172789f06886806bc55
# This folder holds kernels that mlagen compiled. They can be compiled again.
"""


def require_writable(layout: Layout) -> None:
    """Raise :class:`OSError` where publishing cannot succeed; that it may is no promise."""
    require_trusted(layout)
    make_folder(layout.staging, mode=layout.folder_mode)
    if not os.access(layout.staging, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(layout.staging))


def publish(layout: Layout, manifest: Manifest, files: Mapping[str, bytes]) -> Path:
    """Make an entry of ``files`` visible, whole; if there is one already, that one stays.

    The rename is what keeps the store intact, whoever holds a lock or does not: a reader sees
    nothing or everything, and a process that dies leaves a staging folder only.

    Raises
    ------
    OSError
        If the disk refused; nothing is visible then.
    """
    folder = layout.entry(manifest.key, manifest.toolchain)
    staging = layout.new_staging(manifest.key)
    require_trusted(layout)
    make_folder(layout.staging, mode=layout.folder_mode)
    staging.mkdir(mode=layout.folder_mode)
    try:
        for name, content in files.items():
            write_new(staging / name, content, mode=layout.file_mode)
        write_new(staging / MANIFEST, manifest.to_json(), mode=layout.file_mode)
        sync_folder(staging)
        _put(layout, staging, folder)
    finally:
        delete(staging)
    return folder


def _put(layout: Layout, staging: Path, folder: Path) -> None:
    """Move what is staged to its place, which others may be clearing away."""
    for _ in range(_MORE_ATTEMPTS):
        # Whoever removes the last entry of a key removes its folder, and clearing removes all.
        with suppress(FileNotFoundError, FileExistsError):
            _put_once(layout, staging, folder)
            return
    _put_once(layout, staging, folder)


def _put_once(layout: Layout, staging: Path, folder: Path) -> None:
    make_folder(folder.parent, mode=layout.folder_mode)
    require_trusted_above(layout, folder)
    with suppress(FileExistsError):
        write_new(layout.tag, _TAG, mode=layout.file_mode)
    _rename(staging, folder)


def _rename(staging: Path, folder: Path) -> None:
    try:
        staging.rename(folder)
    except OSError as error:
        # Another builder was first, and its entry is as good as ours; or a network folder was
        # asked twice for one rename, and says no to the second.
        is_lost = error.errno in (errno.EEXIST, errno.ENOTEMPTY)
        is_repeated = isinstance(error, FileNotFoundError) and identity_of(staging) is None
        if not (is_lost or (is_repeated and identity_of(folder) is not None)):
            raise
    else:
        with suppress(OSError):  # it is visible; only a power failure could take it back
            sync_folder(folder.parent)
