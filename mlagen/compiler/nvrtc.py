"""NVRTC, by cuda.bindings.nvrtc: compiles a source to a cubin with the library of the key."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from mlagen.artifacts import Cubin, Resources, Source
from mlagen.compiler.toolchain import BUILD, Nvrtc, options_for, version_inside
from mlagen.errors import CompileError, ToolchainError
from mlagen.fork_safety import defer_forks
from mlagen.spec.arch import Arch

logger = logging.getLogger("mlagen")

# Constant, because the name changes the cubin of sources with internal linkage.
PROGRAM_NAME = "kernel.cu"

_POSITION = re.compile(rf"^{re.escape(PROGRAM_NAME)}\((\d+)\)", re.MULTILINE)

# Lines of ptxas.
_ENTRY = re.compile(r"Compiling entry function '(?P<symbol>\w+)'")
_FRAME = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<store>\d+) bytes spill stores, "
    r"(?P<load>\d+) bytes spill loads"
)
_USED = re.compile(r"Used (?P<registers>\d+) registers(?P<rest>.*)")
_SHARED = re.compile(r"(\d+) bytes smem")


class OtherLibraryError(ToolchainError):
    """The bindings of this process call another NVRTC than the one that was found."""


def compile_source(source: Source, arch: Arch, nvrtc: Nvrtc) -> Cubin:
    """Compile ``source`` for ``arch``; needs no GPU and no driver.

    Raises ToolchainError if NVRTC cannot be loaded or does not know ``arch``, or the process has
    another one; CompileError if it rejects the source; positions in the message are in the
    templates.
    """
    start = time.perf_counter()
    code, log = _compile(source, arch, nvrtc, "CUBIN")
    return Cubin(
        code=code,
        log=log,
        resources=parse_resources(log),
        toolchain=f"nvrtc-{_version_of_cubin(code, nvrtc)}",
        compile_ms=(time.perf_counter() - start) * 1e3,
    )


def compile_to_ptx(source: Source, arch: Arch, nvrtc: Nvrtc) -> str:
    """Return the PTX of ``source``, from which :func:`compile_source` makes the cubin.

    Raises ToolchainError if NVRTC cannot be loaded or does not know ``arch``, or the process has
    another one; CompileError if it rejects the source.
    """
    return _compile(source, arch, nvrtc, "PTX")[0].rstrip(b"\0").decode()


def supported_archs(nvrtc: Nvrtc) -> list[int]:
    """Return the numbers of the architectures that ``nvrtc`` compiles for."""
    return list(_call(load_nvrtc(nvrtc), "nvrtcGetSupportedArchs")[0])


@cache
def load_nvrtc(nvrtc: Nvrtc) -> Any:
    """Return cuda.bindings.nvrtc, whose functions are those of ``nvrtc`` in this process.

    Raises OtherLibraryError if they are those of another library; ToolchainError if it cannot be
    loaded.
    """
    try:
        with defer_forks():  # a child cannot load a library that another thread was loading
            other = _other_library(nvrtc)
            from cuda.bindings import nvrtc as bindings

            if other is None:
                bindings.nvrtcVersion()  # finds all functions, under a lock
    except (OSError, AttributeError, ImportError, RuntimeError) as error:
        raise ToolchainError(f"NVRTC: cannot load {nvrtc.path}: {error}") from error
    if other is not None:
        raise OtherLibraryError(
            f"NVRTC: found {nvrtc.version} in {nvrtc.path}, but this process has loaded {other}; "
            f"set LD_LIBRARY_PATH={nvrtc.path.parent} before it starts"
        )
    return bindings


def _other_library(nvrtc: Nvrtc) -> str | None:
    """Load ``nvrtc``; return the library that the bindings call if it is another one.

    The bindings call global symbols, which anything may have loaded, before the library that
    cuda.pathfinder loads; and it takes any loaded NVRTC before it searches for one.
    """
    library = ctypes.CDLL(str(nvrtc.path))
    library.nvrtcVersion  # noqa: B018 - raises for a library that is not NVRTC
    # NVRTC opens its builtins by name, and LD_LIBRARY_PATH may contain another version.
    release = ".".join(map(str, nvrtc.release))
    with suppress(OSError):  # a compilation reports missing builtins
        ctypes.CDLL(str(nvrtc.path.with_name(f"libnvrtc-builtins.so.{release}")))
    process = ctypes.CDLL(None)
    if hasattr(process, "nvrtcVersion"):
        loaded = _file_of(process.nvrtcVersion)
    else:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        loaded = load_nvidia_dynamic_lib("nvrtc").abs_path or "another file"
    return None if os.path.realpath(loaded) == str(nvrtc.path) else loaded


def _file_of(function: Any) -> str:
    """Return the library of a function, by ``dladdr``."""

    class Place(ctypes.Structure):  # Dl_info
        _fields_ = (
            ("file", ctypes.c_char_p),
            *((name, ctypes.c_void_p) for name in ("base", "symbol", "address")),
        )

    place = Place()
    ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(place))
    return os.fsdecode(place.file or b"another file")


def _compile(source: Source, arch: Arch, nvrtc: Nvrtc, result: str) -> tuple[bytes, str]:
    """Return the cubin or the PTX, and the log."""
    bindings = load_nvrtc(nvrtc)
    known = supported_archs(nvrtc)
    if arch.number not in known:
        numbers = ", ".join(f"sm_{number}" for number in known)
        raise ToolchainError(f"arch: NVRTC {nvrtc.version} compiles for {numbers}, got {arch}")
    options = options_for(arch, str(nvrtc), line_info=source.line_info)
    if result == "PTX":  # for the virtual architecture, ptxas does not run
        options = tuple(option.replace("=sm_", "=compute_") for option in options)
    text, name = source.text.encode(), PROGRAM_NAME.encode()
    (program,) = _call(bindings, "nvrtcCreateProgram", text, name, 0, [], [])
    try:
        given = [option.encode() for option in options]
        (status,) = bindings.nvrtcCompileProgram(program, len(given), given)
        log = _read(bindings, program, "nvrtcGetProgramLog").decode(errors="replace")
        log = log.rstrip("\0\n ") + "\n"
        if status:
            log = rewrite_positions(log, source.origins)
            first = next((line for line in log.splitlines() if "error" in line), status.name)
            raise CompileError(f"NVRTC {nvrtc.version}: {first}", log=log, source=source.text)
        return _read(bindings, program, f"nvrtcGet{result}"), log
    finally:
        bindings.nvrtcDestroyProgram(program)


def _read(bindings: Any, program: object, function: str) -> bytes:
    (size,) = _call(bindings, f"{function}Size", program)
    content = bytearray(size)
    _call(bindings, function, program, content)
    return bytes(content)


def _call(bindings: Any, function: str, *arguments: object) -> tuple[Any, ...]:
    status, *values = getattr(bindings, function)(*arguments)
    if status:
        raise ToolchainError(f"NVRTC: {function}: {status.name}")
    return tuple(values)


def rewrite_positions(log: str, origins: Sequence[str]) -> str:
    """Return the log with ``kernel.cu(12)`` as ``template:line (kernel.cu:12)``."""

    def position(match: re.Match[str]) -> str:
        line = int(match[1])
        origin = origins[line - 1] if 0 < line <= len(origins) else ""
        return f"{origin} ({PROGRAM_NAME}:{line})" if origin else f"{PROGRAM_NAME}:{line}"

    return _POSITION.sub(position, log)


def parse_resources(log: str) -> tuple[Resources, ...]:
    """Return the resources of every entry function in the log of ``--ptxas-options=-v``."""
    found = []
    for section in re.split(r"(?=Compiling entry function ')", log)[1:]:
        entry, frame, used = (p.search(section) for p in (_ENTRY, _FRAME, _USED))
        if entry is None or frame is None or used is None:
            continue
        shared = _SHARED.search(used["rest"])
        found.append(
            Resources(
                symbol=entry["symbol"],
                registers=int(used["registers"]),
                stack_bytes=int(frame["stack"]),
                spill_store_bytes=int(frame["store"]),
                spill_load_bytes=int(frame["load"]),
                static_shared_bytes=int(shared[1]) if shared else 0,
            )
        )
    return tuple(found)


def _version_of_cubin(code: bytes, nvrtc: Nvrtc) -> str:
    # The version inside the cubin outranks metadata and file names. NVRTC 12.8 writes it for some
    # architectures only.
    found = BUILD.search(code)
    version = found[1].decode() if found else version_inside(nvrtc.path) or nvrtc.version
    if version != nvrtc.version:
        _warn(nvrtc, version)
    return version


@cache  # once per process, not per kernel
def _warn(nvrtc: Nvrtc, version: str) -> None:
    message = "NVRTC: expected %s from %s, but %s compiled"
    logger.warning(message, nvrtc.version, nvrtc.source, version)
