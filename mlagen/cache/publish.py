"""How an entry comes to be: written aside, then renamed into place in one step."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mlagen.cache.entry import MANIFEST, Manifest
from mlagen.cache.folder import Folder, open_below, open_layout
from mlagen.cache.layout import Layout

# How often the folder of a key may vanish between its making and the rename.
_MORE_ATTEMPTS = 15

# The signature is fixed by the Cache Directory Tagging Specification, bford.info/cachedir.
_TAG = b"""Signature: 8a477f597d28d172789f06886806bc55
# This folder holds kernels that mlagen compiled. They can be compiled again.
"""


def require_writable(layout: Layout) -> None:
    """Raise :class:`OSError` where publishing cannot succeed; that it may is no promise."""
    with open_below(layout, layout.staging.name, makes=True) as staging:
        if not staging.may_write():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), staging.path)


def publish(layout: Layout, manifest: Manifest, files: Mapping[str, bytes]) -> Path:
    """Make an entry of ``files`` visible, whole; if there is one already, that one stays.

    The rename is what keeps the store intact, whoever holds a lock or does not: a reader sees
    nothing or everything, and a process that dies leaves a staging folder only.

    Raises
    ------
    OSError
        If the disk rejected; nothing is visible then.
    """
    place = layout.entry(manifest.key, manifest.toolchain)
    staged = layout.new_staging(manifest.key)
    with (
        open_layout(layout, makes=True) as version,
        version.below(staged.parent.name, makes=True) as staging,
        staging.make(staged.name) as folder,
    ):
        try:
            for name, content in files.items():
                folder.write(name, content)
            folder.write(MANIFEST, manifest.to_json())
            folder.sync()
            _put(version, staging, staged.name, place)
        finally:
            staging.delete(staged.name)
    return place


def _put(version: Folder, staging: Folder, staged: str, place: Path) -> None:
    """Move what is staged to its place, which others may be clearing away."""
    for _ in range(_MORE_ATTEMPTS):
        # Whoever removes the last entry of a key removes its folder, and clearing removes all.
        with suppress(FileNotFoundError, FileExistsError):
            _put_once(version, staging, staged, place)
            return
    _put_once(version, staging, staged, place)


def _put_once(version: Folder, staging: Folder, staged: str, place: Path) -> None:
    *above, toolchain = place.relative_to(version.path).parts
    with version.below(*above, makes=True) as folder:
        with suppress(FileExistsError):
            version.write(version.layout.tag.name, _TAG)
        _rename(staging, staged, folder, toolchain)


def _rename(staging: Folder, staged: str, folder: Folder, toolchain: str) -> None:
    try:
        staging.move(staged, folder, toolchain)
    except OSError as error:
        # Another builder was first, and its entry is as good as ours; or a network folder was
        # asked twice for one rename, and says no to the second.
        is_lost = error.errno in (errno.EEXIST, errno.ENOTEMPTY)
        is_repeated = isinstance(error, FileNotFoundError) and staging.identity_of(staged) is None
        if not (is_lost or (is_repeated and folder.identity_of(toolchain) is not None)):
            raise
    else:
        with suppress(OSError):  # it is visible; only a power failure could take it back
            folder.sync()
