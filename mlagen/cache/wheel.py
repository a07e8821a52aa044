"""A wheel that ships kernels: a package of data, which the store finds by its entry point.

The package holds the entries as a cache folder does, so that it is a read-only layer where it is
installed; nothing of it is ever imported.
"""

from __future__ import annotations

import base64
import hashlib
import keyword
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version

from mlagen import __version__
from mlagen.cache.bundle import Packed
from mlagen.cache.bundle_writing import OnProgress, finished, packed_entries, replacing
from mlagen.cache.catalog import StoredEntry
from mlagen.cache.default_store import PACKAGES
from mlagen.cache.layout import Layout
from mlagen.errors import ArgumentError


def package_of(name: str) -> str:
    """Return the package that a wheel of that name installs.

    Raises
    ------
    ArgumentError
        If it could not be installed beside Python and mlagen.
    """
    try:
        package = canonicalize_name(name, validate=True).replace("-", "_")
    except InvalidName:
        package = ""
    taken = package in {"mlagen", *sys.stdlib_module_names} or keyword.iskeyword(package)
    if taken or not name.isascii() or not package.isidentifier():
        raise ArgumentError(f"wheel: expected a name of its own such as acme-kernels, got {name!r}")
    return package


def export_wheel(
    stored: Sequence[StoredEntry],
    folder: Path,
    name: str,
    *,
    version: str = __version__,
    on_progress: OnProgress | None = None,
) -> tuple[Path, Packed]:
    """Write a wheel with entries into a folder; the same entries make the same bytes.

    Parameters
    ----------
    stored : Sequence[StoredEntry]
        What to ship; every file is verified on its way in.
    folder : Path
        Where the wheel goes; its name is fixed by name and version.
    name : str
        The distribution, such as ``acme-kernels``; the package is ``acme_kernels``.
    version : str
        Its version; the wheel has it in normal form.
    on_progress : OnProgress, optional
        Called with the bytes done and the bytes in all.

    Returns
    -------
    tuple[Path, Packed]
        Where the wheel is, and what it is.

    Raises
    ------
    ArgumentError
        If name or version are none that a wheel can have.
    BundleError
        If an entry is damaged, or the wheel cannot be written.
    """
    package = package_of(name)
    try:
        version = str(Version(version))  # as file names and metadata have it: 1.0-1 is 1.0.post1
    except InvalidVersion:
        raise ArgumentError(
            f"version: expected one such as 1.0 or 1.0.post1, got {version!r}"
        ) from None
    entries = []
    done, total = 0, sum(one.size_bytes for one in stored)
    target = folder / f"{package}-{version}-py3-none-any.whl"
    layout = Layout(Path(package))  # relative: the names in the wheel
    with replacing(target) as file:
        with zipfile.ZipFile(file, "w") as archive:
            wheel = _Wheel(archive)
            wheel.write(f"{package}/__init__.py", b'"""Kernels for mlagen; there is no code."""\n')
            for entry, contents in packed_entries(stored):
                entries.append(entry)
                place = PurePosixPath(layout.entry(entry.key, entry.toolchain))
                for file_name, content in contents.items():
                    wheel.write(f"{place}/{file_name}", content)
                done += entry.size_bytes
                if on_progress is not None:
                    on_progress(done, total)
            wheel.finish(package, name, version)
        return target, finished(file, entries)


class _Wheel:
    """The files of a wheel as they are written, and the list of them that comes last."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._record: list[str] = []

    def write(self, name: str, content: bytes) -> None:
        info = zipfile.ZipInfo(name)  # from 1980, the first year of zip files
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
        points = [f"[{PACKAGES}]", f"{package} = {package}"]
        files = {"METADATA": about, "WHEEL": wheel, "entry_points.txt": points}
        for file_name, lines in files.items():
            self.write(f"{info}/{file_name}", "".join(f"{line}\n" for line in lines).encode())
        record = f"{info}/RECORD"
        self.write(record, "".join(f"{line}\n" for line in [*self._record, f"{record},,"]).encode())
