"""Toolchain selection: the NVRTC to use and its options; no library is loaded."""

from __future__ import annotations

import mmap
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version

from mlagen.errors import ToolchainError
from mlagen.fork_safety import defer_forks
from mlagen.settings import TOOLCHAIN_POLICIES
from mlagen.spec.arch import Arch

OLDEST_NVRTC = (12, 8)

# The wheel that contains libnvrtc.so.<major>; from CUDA 13 on, its name lacks the version.
_WHEELS = {12: "nvidia-cuda-nvrtc-cu12"}
_WHEEL = "nvidia-cuda-nvrtc"

_OPTIONS = (
    "--std=c++17",
    # A quoted include must not be found in the current folder.
    "--no-source-include",
    # The stack limit is process-wide; other threads may be starting children.
    "--modify-stack-limit=false",
    "--fmad=true",
    "--ptxas-options=-v",
)

_ROOT = Path("/")  # replaced by tests

_FULL_NAME = re.compile(r"\.so\.(\d+\.\d+\.\d+)$")
_BANNER = b"Cuda compilation tools, release "
BUILD = re.compile(re.escape(_BANNER) + rb"[\d.]+, V(\d+\.\d+\.\d+)")
# Slices of an ELF header: class and byte order, and machine.
_ELF_KIND, _ELF_MACHINE = slice(0, 6), slice(18, 20)


@dataclass(frozen=True, kw_only=True)
class Nvrtc:
    """The NVRTC that this process loads by ``path`` to compile."""

    version: str  # with the patch level: "13.5.37"
    path: Path
    source: str  # its distribution, or "system"

    def __str__(self) -> str:
        return f"nvrtc-{self.version}"

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


@cache
def find_nvrtc() -> Nvrtc:
    """Return the NVRTC to compile with: the first of the major version of cuda-bindings.

    Raises ToolchainError if cuda-bindings or NVRTC is missing, or older than 12.8; the message has
    the pip command.
    """
    with defer_forks():  # importlib.metadata imports lazily
        major = _bindings_major()
        wheel = _WHEELS.get(major, _WHEEL)
        oldest = None
        for found in _candidates(major):
            if found.release >= OLDEST_NVRTC:
                return found
            oldest = oldest or found
    if oldest is None:
        raise ToolchainError(
            f"NVRTC: no libnvrtc.so.{major} found for cuda-bindings {major}; "
            f"run: pip install {wheel}"
        )
    raise ToolchainError(
        f"NVRTC: expected 12.8 or newer, got {oldest.version} in {oldest.path}; "
        f"run: pip install -U {wheel}"
    )


@cache  # otherwise a missing NVRTC is searched again for each kernel
def wanted_toolchain(policy: str) -> str:
    """Return the toolchain of cache keys: one compiler, or any of a major version.

    The policy ``exact`` is the installed NVRTC; ``compatible`` any of the CUDA major version of the
    installed cuda-bindings; ``auto`` the first, or the second if no NVRTC is installed; anything
    else is the name of a toolchain. Raises ToolchainError if a package that it needs is missing.
    """
    if policy not in TOOLCHAIN_POLICIES:
        return policy
    if policy != "compatible":
        try:
            return str(find_nvrtc())
        except ToolchainError:
            if policy == "exact":
                raise
    with defer_forks():
        return f"nvrtc-{_bindings_major()}"


def is_installed(policy: str) -> bool:
    """Whether the installed NVRTC, which there is, compiles what the policy wants."""
    return policy in TOOLCHAIN_POLICIES or policy == str(find_nvrtc())


def options_for(arch: Arch, toolchain: str, *, line_info: bool = False) -> tuple[str, ...]:
    """Return the compiler options for a target, in order."""
    is_old = _release_of(toolchain) < (12, 9)
    # Family suffixes need 12.9; older versions use the architecture-specific suffix.
    suffix = "a" if is_old and arch.suffix == "f" else arch.suffix
    # From 12.9 on, NVRTC has its own cache in the driver, and calls cuInit for it.
    caching = () if is_old else ("--no-cache",)
    lines = ("--generate-line-info",) if line_info else ()
    return (f"--gpu-architecture=sm_{arch.number}{suffix}", *caching, *_OPTIONS, *lines)


def _bindings_major() -> int:
    try:
        return int(metadata.version("cuda-bindings").split(".")[0])
    except metadata.PackageNotFoundError:
        raise ToolchainError("cuda-bindings: not installed; run: pip install cuda-python") from None


def _release_of(toolchain: str) -> tuple[int, int]:
    numbers = toolchain.removeprefix("nvrtc-").split(".")
    # A toolchain without a minor version means the newest.
    return int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 99


def _candidates(major: int) -> Iterator[Nvrtc]:
    """Yield the NVRTC libraries of a CUDA major version.

    The order is that of cuda.pathfinder: wheels, conda, the folders of the dynamic loader, and
    toolkits. None is loaded.
    """
    library = f"libnvrtc.so.{major}"
    for name in dict.fromkeys((_WHEELS.get(major, _WHEEL), _WHEEL)):
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
                    yield Nvrtc(version=version, path=path, source=name)
    for folder in _system_folders(major):
        try:
            path = (folder / library).resolve()
            found = _version_of(path) if _is_for_this_machine(path) else None
        except (OSError, RuntimeError, ValueError):  # missing, unreadable, or a loop of links
            continue
        if found is not None:
            yield Nvrtc(version=found, path=path, source="system")


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
