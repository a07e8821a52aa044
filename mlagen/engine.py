"""From a spec to a kernel: key, find, build, load. The one place that knows all stages."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from mlagen.artifacts import Build, build_of
from mlagen.cache.entry import CacheEntry
from mlagen.cache.key import CacheKey
from mlagen.cache.store import KernelStore
from mlagen.codegen.sources import template_digest
from mlagen.compiler.toolchain import Nvrtc, find_nvrtc, options_for
from mlagen.settings import Settings, current_settings
from mlagen.spec.kernel import KernelSpec

if TYPE_CHECKING:
    from mlagen.runtime.loader import LoadedKernel

logger = logging.getLogger("mlagen")

_loaded: dict[tuple[KernelSpec, int], LoadedKernel] = {}
_loading = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What asking for a kernel came to."""

    entry: CacheEntry
    built: bool  # compiled by this call, not found
    ms: float


def kernel_store() -> KernelStore:
    """Return the store that the settings name; nothing is created."""
    return _store(current_settings())


@cache
def _store(settings: Settings) -> KernelStore:
    return KernelStore(
        settings.cache_dir, lock_dir=settings.lock_dir, lock_timeout_s=settings.lock_timeout_s
    )


@cache
def key_of(spec: KernelSpec) -> CacheKey:
    """Return the key of ``spec`` for the installed NVRTC; renders and loads nothing.

    Raises
    ------
    ToolchainError
        If no NVRTC is installed.
    """
    nvrtc = find_nvrtc()
    ingredients = [("family", spec.family)]
    ingredients += [(f"spec.{name}", value) for name, value in spec.ingredients().items()]
    for option in options_for(spec.arch, nvrtc):
        name, _, value = option.partition("=")
        ingredients.append((f"option.{name.lstrip('-')}", value))
    ingredients.append(("templates", template_digest()))
    return CacheKey(ingredients=tuple(ingredients), toolchain=str(nvrtc))


def find_or_build(spec: KernelSpec, *, created_by: str = "jit") -> Outcome:
    """Return the cache entry of ``spec``, compiling it if it is not there; needs no GPU.

    Raises
    ------
    ToolchainError
        If no NVRTC is installed, or it does not know the architecture.
    CompileError
        If NVRTC refuses the kernel.
    """
    start = time.perf_counter()
    built = False

    def build() -> Build:
        nonlocal built
        built = True
        return _build(spec, find_nvrtc())

    entry = kernel_store().find_or_build(key_of(spec), build, created_by=created_by)
    return Outcome(entry=entry, built=built, ms=(time.perf_counter() - start) * 1e3)


def kernel_for(spec: KernelSpec, device: int) -> LoadedKernel:
    """Return the kernel of ``spec``, loaded on GPU ``device``; the usual call ends in the memo.

    Raises
    ------
    CaptureError
        If it is not loaded yet and a CUDA graph is being captured.
    DriverError
        If the driver refuses it.
    """
    if kernel := _loaded.get((spec, device)):
        return kernel
    from mlagen.runtime.loader import load, require_no_capture

    require_no_capture(spec, device)
    entry = find_or_build(spec).entry  # outside the lock: other kernels may compile meanwhile
    with _loading:
        kernel = _loaded.get((spec, device)) or load(entry.cubin, spec, device)
        _loaded[spec, device] = kernel
    return kernel


def _build(spec: KernelSpec, nvrtc: Nvrtc) -> Build:
    # Imported here: a warm process loads no Jinja and no NVRTC.
    from mlagen.codegen.render import render
    from mlagen.compiler.nvrtc import compile_source

    logger.info("compiling %s with %s", spec, nvrtc)
    source = render(spec)
    cubin = compile_source(source, spec.arch, nvrtc)
    logger.info("compiled %s in %.1f s", spec.symbol, cubin.compile_ms / 1e3)
    return build_of(
        source,
        cubin,
        spec=spec.ingredients(),
        symbol=spec.symbol,
        shared_bytes=spec.shared_bytes,
    )
