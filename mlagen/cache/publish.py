"""Atomic publication: an entry is staged, then renamed into place."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mlagen.cache.entry import MANIFEST, Manifest
from mlagen.cache.folder import Folder, open_below, open_layout
from mlagen.cache.layout import Layout

# Retries when the folder of a key is removed between its creation and the rename.
_MORE_ATTEMPTS = 15

# The signature is fixed by the Cache Directory Tagging Specification, bford.info/cachedir.
_TAG = b"""Signature: 8a477f597d28d172789f06886806bc55
# This folder holds kernels that mlagen compiled. They can be compiled again.
"""


def require_writable(layout: Layout) -> None:
    """Raise :class:`OSError` if publishing cannot succeed; passing does not guarantee success."""
    with open_below(layout, layout.staging.name, create=True) as staging:
        if not staging.may_write():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), staging.path)


def publish(layout: Layout, manifest: Manifest, files: Mapping[str, bytes]) -> Path:
    """Publish ``files`` as an entry, atomically; an existing entry stays.

    The rename keeps the store intact with or without a lock: a reader sees all of the entry or
    nothing, and a process that dies abandons a staging folder only.

    Raises
    ------
    OSError
        If writing fails; nothing is visible then.
    """
    place = layout.entry(manifest.key, manifest.toolchain)
    staged = layout.new_staging(manifest.key)
    with (
        open_layout(layout, create=True) as version,
        version.below(staged.parent.name, create=True) as staging,
        staging.make(staged.name) as folder,
    ):
        try:
            for name, content in files.items():
                folder.write(name, content)
            folder.write(MANIFEST, manifest.to_json())
            folder.sync()
            _move_into_place(version, staging, staged.name, place)
        finally:
            staging.delete(staged.name)
    return place


def _move_into_place(version: Folder, staging: Folder, staged: str, place: Path) -> None:
    """Rename the staged entry into place, which other processes may be clearing."""
    for _ in range(_MORE_ATTEMPTS):
        # Removing the last entry of a key removes its folder, and clearing removes all.
        with suppress(FileNotFoundError, FileExistsError):
            _try_move(version, staging, staged, place)
            return
    _try_move(version, staging, staged, place)


def _try_move(version: Folder, staging: Folder, staged: str, place: Path) -> None:
    *above, toolchain = place.relative_to(version.path).parts
    with version.below(*above, create=True) as folder:
        with suppress(FileExistsError):
            version.write(version.layout.tag.name, _TAG)
        _rename(staging, staged, folder, toolchain)


def _rename(staging: Folder, staged: str, folder: Folder, toolchain: str) -> None:
    try:
        staging.move(staged, folder, toolchain)
    except OSError as error:
        # Another builder published first, and its entry is equivalent; or a network file system
        # received one rename twice, and the second failed.
        is_lost = error.errno in (errno.EEXIST, errno.ENOTEMPTY)
        is_repeated = isinstance(error, FileNotFoundError) and staging.identity_of(staged) is None
        if not (is_lost or (is_repeated and folder.identity_of(toolchain) is not None)):
            raise
    else:
        with suppress(OSError):  # visible already; the sync guards against power failure only
            folder.sync()
