"""JIT engine: key, look-up, build and load of a kernel; the only module that knows all stages."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from mlagen.artifacts import Build, Cubin, Source, build_of
from mlagen.cache.file import CacheEntry
from mlagen.cache.key import CacheKey
from mlagen.cache.lock import import_filelock
from mlagen.cache.store import kernel_store
from mlagen.codegen.sources import CODEGEN, key_facts, template_inputs, template_root
from mlagen.compiler.toolchain import Nvrtc, find_nvrtc, options_for, wanted_toolchain
from mlagen.errors import MissError, ToolchainError
from mlagen.fork_safety import defer_forks
from mlagen.jit import compile_forbidden_by, jit_mode, report_compilation
from mlagen.monitoring import count
from mlagen.recording import record
from mlagen.settings import current_settings
from mlagen.spec.arch import Arch
from mlagen.spec.kernel import KernelSpec

if TYPE_CHECKING:
    from mlagen.runtime.loader import LoadedKernel

Compiler: TypeAlias = Callable[[Source, Arch, Nvrtc], Cubin]

_loaded: dict[tuple[KernelSpec, int], LoadedKernel] = {}
_loading = threading.Lock()

import_filelock()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a kernel look-up."""

    entry: CacheEntry
    built: bool  # compiled by this call
    ms: float


def key_of(spec: KernelSpec) -> CacheKey:
    """Return the cache key of ``spec`` for the toolchain of the settings; renders nothing.

    Raises ToolchainError if that toolchain is not installed.
    """
    settings = current_settings()
    return _key_of(spec, wanted_toolchain(settings.toolchain), settings.line_info)


@cache
def _key_of(spec: KernelSpec, toolchain: str, line_info: bool = False) -> CacheKey:
    key_fields = [("family", spec.family)]
    key_fields += [(f"spec.{name}", value) for name, value in spec.key_fields().items()]
    key_fields += [(f"fact.{name}", text) for name, text in key_facts(spec).items()]
    for option in options_for(spec.arch, toolchain, line_info=line_info):
        name, _, value = option.partition("=")
        key_fields.append((f"option.{name.lstrip('-')}", value))
    if line_info:  # the cubin has the paths of the templates
        key_fields.append(("line_info", str(template_root())))
    key_fields.append(("codegen", CODEGEN))
    key_fields.append(("templates", template_inputs(spec.folder).digest))
    return CacheKey(key_fields=tuple(key_fields), toolchain=toolchain)


def find_or_build(spec: KernelSpec, *, created_by: str = "jit") -> Outcome:
    """Return the cache entry of ``spec``, compiling it if it is missing; needs no GPU.

    Raises MissError if it is missing and this process may not compile, or has no NVRTC;
    ToolchainError if NVRTC does not know the architecture; CompileError if NVRTC rejects the
    kernel.
    """
    start = time.perf_counter()
    key, store = key_of(spec), kernel_store()
    found = store.look_up(key)
    if found.entry is None:
        return build_missing(spec, found.reason or "absent", created_by=created_by)
    source = {None: "memory", store.root: "cache"}.get(found.layer, "layer")
    count("hits")
    count(f"hits.{source}")
    return _outcome(spec, found.entry, start, built=False)


def build_missing(
    spec: KernelSpec, reason: str, *, created_by: str, compiler: Compiler | None = None
) -> Outcome:
    """Return the cache entry of ``spec`` after a look-up that missed for a reason.

    Under its lock, the kernel is looked up once more. ``compiler`` compiles in place of NVRTC in
    this process. Raises MissError if this process may not compile, or has no NVRTC; ToolchainError
    if NVRTC does not know the architecture; CompileError if NVRTC rejects the kernel.
    """
    start = time.perf_counter()
    key, store = key_of(spec), kernel_store()
    count("misses")
    count(f"misses.{reason}".replace(" ", "_"))
    nvrtc = _compiler_of(spec, key, reason, created_by)
    built = False

    def build() -> Build:
        nonlocal built
        built = True
        is_awaited = created_by == "jit"
        with report_compilation(str(spec), reason, str(nvrtc), store.root, is_awaited=is_awaited):
            return build_spec(spec, nvrtc, compiler)

    entry = store.build(key, build, created_by=created_by, because=reason)
    return _outcome(spec, entry, start, built=built)


def _outcome(spec: KernelSpec, entry: CacheEntry, start: float, *, built: bool) -> Outcome:
    settings = current_settings()
    if settings.record:
        record(
            settings.record,
            kernel=str(spec),
            key=entry.manifest.key,
            toolchain=entry.manifest.toolchain,
            found="built" if built else "hit",
            is_shared=settings.trusts_shared,
        )
    return Outcome(entry=entry, built=built, ms=(time.perf_counter() - start) * 1e3)


def kernel_for(spec: KernelSpec, device: int) -> LoadedKernel:
    """Return the kernel of ``spec``, loaded on GPU ``device``; loaded kernels need one dict lookup.

    Raises CaptureError if it is not loaded yet during CUDA graph capture; DriverError if the driver
    rejects it.
    """
    if kernel := _loaded.get((spec, device)):
        return kernel
    with defer_forks():
        from mlagen.runtime.loader import load, require_no_capture

    require_no_capture(spec, device)
    entry = find_or_build(spec).entry  # outside the lock: other kernels may compile meanwhile
    with _loading:
        kernel = _loaded.get((spec, device)) or load(entry.cubin, spec, device)
        _loaded[spec, device] = kernel
    return kernel


def _compiler_of(spec: KernelSpec, key: CacheKey, reason: str, created_by: str) -> Nvrtc:
    """Return the compiler for a missing kernel, if this process may compile it."""
    mode, where, cause = jit_mode(), "", None
    if mode == "off" or (mode == "error" and created_by == "jit"):
        why = f"{compile_forbidden_by()} forbids to compile"
    else:
        try:
            nvrtc = find_nvrtc()
            if key.accepts(str(nvrtc)):
                return nvrtc
            why = f"MLAGEN_TOOLCHAIN wants {key.toolchain}, but {nvrtc} is installed"
            where = "where that one is, "
        except ToolchainError as error:
            why, cause = f"there is no compiler ({error})", error
            where = "where NVRTC is installed, "
    count("rejections")
    message = f"{spec}: {reason} in the cache, and {why}; {where}{prewarm_advice(spec)}"
    raise MissError(message) from cause


def prewarm_advice(spec: KernelSpec) -> str:
    """Return the advice to compile a missing kernel."""
    setting = "MLAGEN_JIT=on " if jit_mode() == "off" else ""
    return f"run: {setting}mlagen prewarm --kernel '{spec}'"


def build_spec(spec: KernelSpec, nvrtc: Nvrtc, compiler: Compiler | None = None) -> Build:
    """Render and compile ``spec`` as the settings say; looks into no cache.

    Raises ToolchainError if NVRTC does not know the architecture; CompileError if NVRTC rejects the
    kernel.
    """
    # Imported here: a warm process loads no Jinja and no NVRTC. Forks are deferred: a child forked
    # during an import or a template load would wait for its lock for ever.
    with defer_forks():
        from mlagen.codegen.render import render
        from mlagen.compiler.process import compile_anywhere

        source = render(spec, line_info=current_settings().line_info)
    cubin = (compiler or compile_anywhere)(source, spec.arch, nvrtc)
    return build_of(
        source,
        cubin,
        spec=spec.key_fields(),
        symbol=spec.symbol,
        shared_bytes=spec.shared_bytes,
    )


def _after_fork() -> None:
    global _loading  # noqa: PLW0603 - another thread of the parent may have held it
    _loading = threading.Lock()
    _loaded.clear()  # kernels of a CUDA context that the child does not have


os.register_at_fork(after_in_child=_after_fork)
