"""Data passed between the JIT stages: rendered source, cubin, and finished build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Source:
    """A rendered kernel.

    ``origins[i]`` is the ``template:line`` of line ``i + 1`` of ``text``. With ``line_info``, the
    text has ``#line`` directives, and is compiled with line info.
    """

    text: str
    origins: tuple[str, ...]
    line_info: bool = False


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resource usage of one kernel, as ptxas reports it; sizes in bytes."""

    symbol: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int

    @property
    def has_spills(self) -> bool:
        """Whether registers spill to local memory."""
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


@dataclass(frozen=True, kw_only=True)
class Cubin:
    """A compiled cubin, with the compiler log and resource usage."""

    code: bytes
    log: str
    resources: tuple[Resources, ...]
    toolchain: str
    compile_ms: float


@dataclass(frozen=True, kw_only=True)
class Build:
    """A finished build: the files of a cache entry, and facts for its manifest.

    ``files`` maps names such as ``kernel.cubin`` to contents. ``facts`` is JSON data.
    ``toolchain`` names the compiler that ran.
    """

    files: Mapping[str, bytes]
    facts: Mapping[str, Any]
    toolchain: str


def build_of(
    source: Source, cubin: Cubin, *, spec: Mapping[str, str], symbol: str, shared_bytes: int
) -> Build:
    """Return the files and the manifest facts of one compiled kernel."""
    return Build(
        files={
            "kernel.cubin": cubin.code,
            "kernel.cu": source.text.encode(),
            "kernel.map": ("\n".join(source.origins) + "\n").encode(),
            "build.log": cubin.log.encode(),
        },
        facts={
            "kernel": {"symbol": symbol, "spec": dict(spec), "dynamic_shared_bytes": shared_bytes},
            "resources": [asdict(resources) for resources in cubin.resources],
            "compile_ms": round(cubin.compile_ms, 1),
        },
        toolchain=cubin.toolchain,
    )
