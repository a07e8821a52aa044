"""Toolchain selection: the NVRTC to use and its options; the library is not loaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from mlagen.compiler.nvrtc_search import find_candidates
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

    Raises
    ------
    ToolchainError
        If cuda-bindings or NVRTC is missing, or older than 12.8; the message has the pip command.
    """
    with defer_forks():  # importlib.metadata imports lazily
        major = _bindings_major()
        wheel = _WHEELS.get(major, _WHEEL)
        found = _first_supported(major)
    if found is None:
        raise ToolchainError(
            f"NVRTC: no libnvrtc.so.{major} found for cuda-bindings {major}; "
            f"run: pip install {wheel}"
        )
    if found.release < OLDEST_NVRTC:
        raise ToolchainError(
            f"NVRTC: expected 12.8 or newer, got {found.version} in {found.path}; "
            f"run: pip install -U {wheel}"
        )
    return found


@cache  # otherwise a missing NVRTC is searched again for each kernel
def wanted_toolchain(policy: str) -> str:
    """Return the toolchain of cache keys: one compiler, or any of a major version.

    Parameters
    ----------
    policy : str
        ``exact`` is the installed NVRTC; ``compatible`` any of the CUDA major version of the
        installed cuda-bindings; ``auto`` the first, or the second if no NVRTC is installed;
        anything else is the name of a toolchain.

    Raises
    ------
    ToolchainError
        If a package that the policy needs is not installed.
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


def _first_supported(major: int) -> Nvrtc | None:
    """Return the first NVRTC that is new enough, or else the first one found."""
    oldest = None
    for candidate in find_candidates(major, dict.fromkeys((_WHEELS.get(major, _WHEEL), _WHEEL))):
        found = Nvrtc(**candidate._asdict())
        if found.release >= OLDEST_NVRTC:
            return found
        oldest = oldest or found
    return oldest


def _bindings_major() -> int:
    try:
        return int(metadata.version("cuda-bindings").split(".")[0])
    except metadata.PackageNotFoundError:
        raise ToolchainError("cuda-bindings: not installed; run: pip install cuda-python") from None


def _release_of(toolchain: str) -> tuple[int, int]:
    numbers = toolchain.removeprefix("nvrtc-").split(".")
    # A toolchain without a minor version means the newest.
    return int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 99
