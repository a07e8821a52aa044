"""How an entry comes to be: written aside, then renamed into place in one step."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mlagen.cache.entry import MANIFEST, Manifest
from mlagen.cache.files import make_folder, sync_folder, write_new
from mlagen.cache.layout import Layout

# The signature is fixed by the Cache Directory Tagging Specification, bford.info/cachedir.
_TAG = b"""Signature: 8a477f597d28d172789f06886806bc55
# This folder holds kernels that mlagen compiled. They can be compiled again.
"""


def require_writable(layout: Layout) -> None:
    """Raise :class:`OSError` where publishing cannot succeed; that it may is no promise."""
    make_folder(layout.staging)
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
    make_folder(layout.staging)
    staging.mkdir(mode=0o700)
    try:
        for name, content in files.items():
            write_new(staging / name, content)
        write_new(staging / MANIFEST, manifest.to_json())
        sync_folder(staging)
        make_folder(folder.parent)
        with suppress(FileExistsError):
            write_new(layout.tag, _TAG)
        _rename(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _rename(staging: Path, folder: Path) -> None:
    try:
        staging.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise  # else another builder was first, and its entry is as good as ours
    else:
        with suppress(OSError):  # it is visible; only a power failure could take it back
            sync_folder(folder.parent)
