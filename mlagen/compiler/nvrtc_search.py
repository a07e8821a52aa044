"""NVRTC search: candidate library files in search order; none is loaded."""

from __future__ import annotations

import mmap
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

_ROOT = Path("/")  # replaced by tests

_FULL_NAME = re.compile(r"\.so\.(\d+\.\d+\.\d+)$")
_BANNER = b"Cuda compilation tools, release "
BUILD = re.compile(re.escape(_BANNER) + rb"[\d.]+, V(\d+\.\d+\.\d+)")
# Slices of an ELF header: class and byte order, and machine.
_ELF_KIND, _ELF_MACHINE = slice(0, 6), slice(18, 20)


class Candidate(NamedTuple):
    """A library file with its version."""

    version: str  # with the patch level: "13.5.37"
    path: Path
    source: str  # its distribution, or "system"


def find_candidates(major: int, wheels: Iterable[str]) -> Iterator[Candidate]:
    """Yield the NVRTC libraries of a CUDA major version.

    The order is that of cuda.pathfinder: wheels, conda, the folders of the dynamic loader, and
    toolkits.
    """
    library = f"libnvrtc.so.{major}"
    for name in wheels:
        try:
            distribution = metadata.distribution(name)
            # A post-release or local build of a wheel contains the library of its base version.
            version = Version(distribution.version).base_version
        except (metadata.PackageNotFoundError, InvalidVersion):
            continue
        for file in distribution.files or ():
            if file.name == library:
                path = Path(os.path.realpath(str(distribution.locate_file(file))))
                if os.path.isfile(path):  # noqa: PTH113 - never raises
                    yield Candidate(version, path, name)
    for folder in _system_folders(major):
        try:
            path = (folder / library).resolve()
            found = _version_of(path) if _is_for_this_machine(path) else None
        except (OSError, RuntimeError, ValueError):  # missing, unreadable, or a loop of links
            continue
        if found is not None:
            yield Candidate(found, path, "system")


@cache
def version_inside(path: Path) -> str | None:
    """Return the version string inside a library, ``None`` if it has none.

    The search reads about 100 MB; a version from a wheel or a file name avoids it.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.find(_BANNER)
        while start >= 0:
            if match := BUILD.match(content, start):
                return match[1].decode()
            start = content.find(_BANNER, start + 1)
    return None


def _version_of(path: Path) -> str | None:
    match = _FULL_NAME.search(path.name)
    return match[1] if match else version_inside(path)


def _is_for_this_machine(path: Path) -> bool:
    # Cross-compilation toolkits and search paths contain libraries for several machines.
    with path.open("rb") as file, Path("/proc/self/exe").open("rb") as own:
        header, expected = file.read(20), own.read(20)
    return all(header[part] == expected[part] for part in (_ELF_KIND, _ELF_MACHINE))


def _system_folders(major: int) -> Iterator[Path]:
    prefixes = [os.environ.get("CONDA_PREFIX", "")]
    if _matches(Path(sys.prefix), "conda-meta"):  # an environment without activation
        prefixes.append(sys.prefix)
    for prefix in prefixes:
        yield from _folders_of_toolkit(prefix)
    # Relative folders are skipped: libraries of the current folder must not be loaded.
    listed = re.split("[:;]", os.environ.get("LD_LIBRARY_PATH", ""))
    for settings in _matches(_ROOT / "etc/ld.so.conf.d", "*.conf"):
        with suppress(OSError):
            listed += settings.read_text(errors="replace").splitlines()
    yield from (Path(folder) for folder in listed if Path(folder).is_absolute())
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        yield from _folders_of_toolkit(os.environ.get(variable, ""))
    local = _ROOT / "usr/local"
    versioned = sorted(_matches(local, f"cuda-{major}*"), key=_numbers_of, reverse=True)
    for toolkit in (*versioned, local / "cuda"):
        yield from _folders_of_toolkit(str(toolkit))
    yield from _matches(_ROOT / "usr/lib", "*-linux-gnu")
    yield from (_ROOT / "usr/lib64", _ROOT / "usr/lib")


def _folders_of_toolkit(root: str) -> Iterator[Path]:
    if root and Path(root).is_absolute():
        yield from (Path(root, "lib64"), Path(root, "lib"))
        yield from _matches(Path(root, "targets"), "*/lib")


def _matches(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:  # an unreadable folder counts as missing
        return []


def _numbers_of(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]
