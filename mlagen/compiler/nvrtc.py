"""Source to cubin with NVRTC."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from mlagen.artifacts import Cubin, Source
from mlagen.compiler.ptxas import parse_resources
from mlagen.compiler.toolchain import Nvrtc, options_for
from mlagen.errors import CompileError, ToolchainError
from mlagen.spec.arch import Arch

logger = logging.getLogger("mlagen")

# Constant, because the name changes the machine code of sources with internal linkage.
PROGRAM_NAME = "kernel.cu"

_POSITION = re.compile(rf"^{re.escape(PROGRAM_NAME)}\((\d+)\)", re.MULTILINE)
_BUILD = re.compile(rb"Cuda compilation tools, release [\d.]+, V(\d+\.\d+\.\d+)")


def compile_source(source: Source, arch: Arch, nvrtc: Nvrtc) -> Cubin:
    """Compile ``source`` for ``arch``; needs no GPU and no driver.

    Raises
    ------
    ToolchainError
        If NVRTC cannot be loaded or does not know ``arch``.
    CompileError
        If it refuses the source; positions in the message are in the templates.
    """
    # Imported here: a warm process loads neither the bindings of NVRTC nor the library.
    from cuda.bindings import nvrtc as api

    _require_arch(api, arch, nvrtc)
    program = _checked(
        api, api.nvrtcCreateProgram(source.text.encode(), PROGRAM_NAME.encode(), 0, None, None)
    )
    try:
        return _compile(api, program, source, options_for(arch, str(nvrtc)), nvrtc)
    finally:
        api.nvrtcDestroyProgram(program)


def is_hidden(nvrtc: Nvrtc) -> bool:
    """Whether calls would reach an NVRTC of another major version instead.

    The bindings take functions that any library has brought into the process for all to see, such
    as the NVRTC of a torch for another CUDA.
    """
    from cuda.bindings import nvrtc as api

    try:
        _, major, _ = api.nvrtcVersion()
    except RuntimeError:
        return False  # it cannot be loaded, which compiling says better
    return bool(major != nvrtc.release[0])


def rewrite_positions(log: str, origins: Sequence[str]) -> str:
    """Return the log with ``kernel.cu(12)`` as ``template:line (kernel.cu:12)``."""

    def position(match: re.Match[str]) -> str:
        line = int(match[1])
        origin = origins[line - 1] if 0 < line <= len(origins) else ""
        return f"{origin} ({PROGRAM_NAME}:{line})" if origin else f"{PROGRAM_NAME}:{line}"

    return _POSITION.sub(position, log)


def _compile(api: Any, program: Any, source: Source, options: Sequence[str], nvrtc: Nvrtc) -> Cubin:
    start = time.perf_counter()
    (status,) = api.nvrtcCompileProgram(
        program, len(options), [option.encode() for option in options]
    )
    compile_ms = (time.perf_counter() - start) * 1e3
    log = _text(api, program, api.nvrtcGetProgramLogSize, api.nvrtcGetProgramLog).decode()
    log = log.rstrip("\0\n ") + "\n"
    if int(status) != 0:
        log = rewrite_positions(log, source.origins)
        first = next((line for line in log.splitlines() if "error" in line), status.name)
        raise CompileError(f"NVRTC {nvrtc.version}: {first}", log=log, source=source.text)
    code = _text(api, program, api.nvrtcGetCUBINSize, api.nvrtcGetCUBIN)
    return Cubin(
        code=code,
        log=log,
        resources=parse_resources(log),
        toolchain=f"nvrtc-{_build_of(code, nvrtc)}",
        compile_ms=compile_ms,
    )


def _build_of(code: bytes, nvrtc: Nvrtc) -> str:
    # The library's own word outranks the metadata of the distribution it seems to come from.
    found = _BUILD.search(code)
    version = found[1].decode() if found else nvrtc.version
    if version != nvrtc.version:
        _warn(nvrtc, version)
    return version


@cache  # once for a process, not for each kernel
def _warn(nvrtc: Nvrtc, version: str) -> None:
    message = "NVRTC: expected %s from %s, but %s compiled"
    logger.warning(message, nvrtc.version, nvrtc.source, version)


def _require_arch(api: Any, arch: Arch, nvrtc: Nvrtc) -> None:
    try:
        result = api.nvrtcGetSupportedArchs()
    except RuntimeError as error:  # how cuda.bindings says that the library is not there
        raise ToolchainError(f"NVRTC: cannot load {nvrtc.path}: {error}") from error
    known = _checked(api, result)
    if arch.number not in known:
        numbers = ", ".join(f"sm_{number}" for number in known)
        raise ToolchainError(f"arch: NVRTC {nvrtc.version} compiles for {numbers}, got {arch}")


def _text(api: Any, program: Any, size_of: Any, read: Any) -> bytes:
    content = bytes(_checked(api, size_of(program)))
    _checked(api, read(program, content))
    return content


def _checked(api: Any, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        (_, text) = api.nvrtcGetErrorString(status)
        raise ToolchainError(f"NVRTC: {text.decode() if isinstance(text, bytes) else text}")
    return values[0] if len(values) == 1 else tuple(values)
