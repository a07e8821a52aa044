"""NVRTC compilation of a source to a cubin."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from functools import cache

from mlagen.artifacts import Cubin, Source
from mlagen.compiler.nvrtc_library import Compiled, load_nvrtc
from mlagen.compiler.nvrtc_search import BUILD, version_inside
from mlagen.compiler.ptxas import parse_resources
from mlagen.compiler.toolchain import Nvrtc, options_for
from mlagen.errors import CompileError, ToolchainError
from mlagen.spec.arch import Arch

logger = logging.getLogger("mlagen")

# Constant, because the name changes the cubin of sources with internal linkage.
PROGRAM_NAME = "kernel.cu"

_POSITION = re.compile(rf"^{re.escape(PROGRAM_NAME)}\((\d+)\)", re.MULTILINE)


def compile_source(source: Source, arch: Arch, nvrtc: Nvrtc) -> Cubin:
    """Compile ``source`` for ``arch``; needs no GPU and no driver.

    Raises
    ------
    ToolchainError
        If NVRTC cannot be loaded or does not know ``arch``.
    CompileError
        If it rejects the source; positions in the message are in the templates.
    """
    start = time.perf_counter()
    compiled = _compile(source, arch, nvrtc)
    compile_ms = (time.perf_counter() - start) * 1e3
    log = _log_of(compiled)
    return Cubin(
        code=compiled.code,
        log=log,
        resources=parse_resources(log),
        toolchain=f"nvrtc-{_version_of_cubin(compiled.code, nvrtc)}",
        compile_ms=compile_ms,
    )


def compile_to_ptx(source: Source, arch: Arch, nvrtc: Nvrtc) -> str:
    """Return the PTX of ``source``, from which :func:`compile_source` makes the cubin.

    Raises
    ------
    ToolchainError
        If NVRTC cannot be loaded or does not know ``arch``.
    CompileError
        If it rejects the source.
    """
    return _compile(source, arch, nvrtc, result="PTX").code.rstrip(b"\0").decode()


def _compile(source: Source, arch: Arch, nvrtc: Nvrtc, result: str = "CUBIN") -> Compiled:
    library = load_nvrtc(nvrtc.path)
    known = library.supported_archs()
    if arch.number not in known:
        numbers = ", ".join(f"sm_{number}" for number in known)
        raise ToolchainError(f"arch: NVRTC {nvrtc.version} compiles for {numbers}, got {arch}")
    options = options_for(arch, str(nvrtc), line_info=source.line_info)
    if result == "PTX":  # for the virtual architecture, ptxas does not run
        options = tuple(option.replace("=sm_", "=compute_") for option in options)
    compiled = library.compile(source.text, PROGRAM_NAME, options, result=result)
    if compiled.error is not None:
        log = rewrite_positions(_log_of(compiled), source.origins)
        first = next((line for line in log.splitlines() if "error" in line), compiled.error)
        raise CompileError(f"NVRTC {nvrtc.version}: {first}", log=log, source=source.text)
    return compiled


def _log_of(compiled: Compiled) -> str:
    return compiled.log.rstrip("\0\n ") + "\n"


def rewrite_positions(log: str, origins: Sequence[str]) -> str:
    """Return the log with ``kernel.cu(12)`` as ``template:line (kernel.cu:12)``."""

    def position(match: re.Match[str]) -> str:
        line = int(match[1])
        origin = origins[line - 1] if 0 < line <= len(origins) else ""
        return f"{origin} ({PROGRAM_NAME}:{line})" if origin else f"{PROGRAM_NAME}:{line}"

    return _POSITION.sub(position, log)


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
