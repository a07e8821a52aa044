"""Wheel export: a data-only package of kernels, which the store finds by its entry point.

The package has the layout of a cache folder, so that its installation is a read-only layer; it is
never imported.
"""

from __future__ import annotations

import base64
import hashlib
import keyword
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version

from mlagen import __version__
from mlagen.cache.bundle import (
    BundleError,
    BundleSummary,
    OnProgress,
    atomic_file,
    verified_entries,
)
from mlagen.cache.store import ENTRY_POINT_GROUP, StoredEntry
from mlagen.errors import ArgumentError


def package_of(name: str) -> str:
    """Return the package name of a wheel of that name.

    Raises ArgumentError if it is invalid or collides with a module of Python or mlagen.
    """
    try:
        package = canonicalize_name(name, validate=True).replace("-", "_")
    except InvalidName:
        package = ""
    is_taken = package in {"mlagen", *sys.stdlib_module_names} or keyword.iskeyword(package)
    if is_taken or not name.isascii() or not package.isidentifier():
        raise ArgumentError(f"wheel: expected a name of its own such as acme-kernels, got {name!r}")
    return package


def normalized(version: str) -> str:
    """Return a version as in file names and metadata: 1.0-1 is 1.0.post1.

    Raises ArgumentError if it is invalid.
    """
    try:
        return str(Version(version))
    except InvalidVersion:
        rule = "expected one such as 1.0 or 1.0.post1"
        raise ArgumentError(f"wheel-version: {rule}, got {version!r}") from None


def export_wheel(
    stored: Sequence[StoredEntry],
    folder: Path,
    name: str,
    *,
    version: str = __version__,
    on_progress: OnProgress | None = None,
) -> tuple[Path, BundleSummary]:
    """Write a reproducible wheel with entries into a folder, and return its path and summary.

    Every file is verified when it is read. ``name`` is the distribution, such as ``acme-kernels``,
    whose package is ``acme_kernels``. Raises ArgumentError if name or version is not valid for a
    wheel; BundleError if an entry is damaged, or the wheel cannot be written.
    """
    package, version = package_of(name), normalized(version)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"wheel: expected a folder, got {error.strerror}: {folder}"
        raise BundleError(message, path=folder) from error
    entries = []
    target = folder / f"{package}-{version}-py3-none-any.whl"
    with atomic_file(target) as file:
        with zipfile.ZipFile(file, "w") as archive:
            wheel = _Wheel(archive)
            wheel.write(f"{package}/__init__.py", b'"""Kernels for mlagen; there is no code."""\n')
            for entry, content in verified_entries(stored, on_progress):
                entries.append(entry)
                wheel.write(f"{package}/{entry.member}", content)
            wheel.finish(package, name, version)
        return target, BundleSummary.of(file, entries)


class _Wheel:
    """Writes the files of a wheel, and RECORD last."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._record: list[str] = []

    def write(self, name: str, content: bytes) -> None:
        info = zipfile.ZipInfo(name)  # default time 1980-01-01, for reproducible bytes
        info.external_attr = 0o100644 << 16
        info.compress_type = zipfile.ZIP_DEFLATED
        self._archive.writestr(info, content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        self._record.append(f"{name},sha256={digest},{len(content)}")

    def finish(self, package: str, name: str, version: str) -> None:
        info = f"{package}-{version}.dist-info"
        about = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            f"Version: {version}",
            "Summary: Compiled attention kernels for mlagen",
        ]
        wheel = [
            "Wheel-Version: 1.0",
            f"Generator: mlagen {__version__}",
            "Root-Is-Purelib: true",
            "Tag: py3-none-any",
        ]
        points = [f"[{ENTRY_POINT_GROUP}]", f"{package} = {package}"]
        files = {"METADATA": about, "WHEEL": wheel, "entry_points.txt": points}
        for file_name, lines in files.items():
            self.write(f"{info}/{file_name}", "".join(f"{line}\n" for line in lines).encode())
        record = f"{info}/RECORD"
        self.write(record, "".join(f"{line}\n" for line in [*self._record, f"{record},,"]).encode())
