"""A kernel as `mlagen kernel` shows it: source, PTX, SASS and resources, without a call."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from mlagen.cache.file import CUBIN, CacheEntry, DamageError
from mlagen.errors import CacheError

from .entries import resources_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlagen.artifacts import Source
    from mlagen.compiler.toolchain import Nvrtc
    from mlagen.spec.arch import Arch
    from mlagen.spec.kernel import KernelSpec


_REGISTERS = 65536  # of an SM
_REGISTER_UNIT = 256  # registers are allocated to a warp in multiples
_SUB_PARTITIONS = 4  # of an SM; a warp stays in one

# Warps and CTAs of an SM, where there are fewer than 64 and 32.
_MAX_WARPS = dict.fromkeys((86, 87, 89, 110, 120, 121), 48)
_MAX_CTAS = {**dict.fromkeys((86, 87), 16), **dict.fromkeys((89, 110, 120, 121), 24)}


def ctas_per_sm(arch: Arch, *, threads: int, registers: int, shared_bytes: int) -> int:
    """Return how many CTAs of that size an SM holds at once.

    ``registers`` are those of a thread at the launch, and ``shared_bytes`` static and dynamic.
    """
    warps = -(-threads // 32)
    warp_registers = max(1, -(-registers * 32 // _REGISTER_UNIT)) * _REGISTER_UNIT
    per_sub_partition = _REGISTERS // _SUB_PARTITIONS // warp_registers
    by_registers = per_sub_partition * _SUB_PARTITIONS // warps
    by_warps = _MAX_WARPS.get(arch.number, 64) // warps
    count = min(by_registers, by_warps, _MAX_CTAS.get(arch.number, 32))
    while count and not arch.fits(shared_bytes, count):
        count -= 1
    return count


_CONSTANT = re.compile(r"^constexpr int (\w+) = (\d+);", re.MULTILINE)
# Its kernels change their registers per thread after the launch.
_SETMAXNREG = "ptx/setmaxnreg.cuh"
_TILE = {"BLOCK_M": "kBlockM", "BLOCK_N": "kBlockN", "stages": "kStages"}


@dataclass(frozen=True, kw_only=True)
class KernelView:
    """A compiled kernel, from the cache or by this process."""

    spec: KernelSpec
    key: str
    toolchain: str
    is_cached: bool
    cubin: bytes
    code_bytes: int
    resources: Sequence[Mapping[str, Any]]  # of its one symbol, as in a manifest

    @classmethod
    def of(cls, spec: KernelSpec) -> KernelView:
        """Return the cached kernel of ``spec``, or compile it; the cache is not changed.

        Raises ToolchainError if it is not cached and NVRTC is missing or another one than the
        settings want; CompileError if NVRTC rejects the kernel; CacheError if its cached cubin, as
        that of a bundle may be, is no whole ELF file.
        """
        from mlagen.cache.store import kernel_store
        from mlagen.engine import build_spec, key_of

        key = key_of(spec)
        entry = kernel_store().look_up(key, is_dry=True).entry
        if entry is not None:
            facts, toolchain, cubin = entry.manifest.facts, entry.manifest.toolchain, entry.cubin
            size = _cached_code_bytes(entry)
        else:
            nvrtc = _compiler_for(key.toolchain)
            click.echo(f"compiling {spec.family} for {spec.arch} with {nvrtc}", err=True)
            build = build_spec(spec, nvrtc)
            facts, toolchain, cubin = build.facts, build.toolchain, build.files[CUBIN]
            size = code_bytes(cubin)
        return cls(
            spec=spec,
            key=key.digest,
            toolchain=toolchain,
            is_cached=entry is not None,
            cubin=cubin,
            code_bytes=size,
            resources=resources_of(facts["resources"]),
        )

    def sass(self) -> str:
        """Return the SASS, by nvdisasm."""
        from .disassembly import sass_of

        return sass_of(self.cubin, str(self.spec))

    def opcodes(self) -> dict[str, int] | None:
        """Return the count of each opcode; None without nvdisasm, with a line on stderr."""
        from mlagen.errors import ToolchainError

        from .disassembly import opcodes_of

        try:
            return opcodes_of(self.sass())
        except ToolchainError as error:
            click.echo(f"no counts of instructions: {error}", err=True)
            return None

    def document(self) -> dict[str, Any]:
        """Return the kernel as JSON data."""
        spec, kernel = self.spec, self.resources[0]
        return {
            "kernel": str(spec),
            "family": spec.family,
            "spec": spec.key_fields(),
            "key": self.key,
            "toolchain": self.toolchain,
            "is_cached": self.is_cached,
            "threads": spec.threads,
            **kernel,
            "dynamic_shared_bytes": spec.shared_bytes,
            "max_active_ctas": ctas_per_sm(
                spec.arch,
                threads=spec.threads,
                registers=kernel["registers"],
                shared_bytes=kernel["static_shared_bytes"] + spec.shared_bytes,
            ),
            "code_bytes": self.code_bytes,
            "template": files_of(spec)[-1],
            "includes": includes_of(spec),
        }

    def resource_texts(self) -> dict[str, str]:
        """Return the compiler, the tile and the resources as `kernel show` names them."""
        document, tile = self.document(), tile_of(self.spec)
        static, dynamic = (document[f"{kind}_shared_bytes"] for kind in ("static", "dynamic"))
        spilled = document["spill_store_bytes"] + document["spill_load_bytes"]
        at_launch = " at launch" if _SETMAXNREG in document["includes"] else ""
        tile_text = ", ".join(f"{name} {value}" for name, value in tile.items())
        return {
            "compiler": self.toolchain,
            **({"tile": tile_text} if tile else {}),
            "threads": f"{document['threads']} per CTA",
            "registers": f"{document['registers']} per thread{at_launch}",
            "spills": f"{spilled} bytes, stack {document['stack_bytes']} bytes per thread",
            "shared memory": f"{static + dynamic} bytes per CTA, {static} of them static",
            "CTAs per SM": str(document["max_active_ctas"]),
            "code": f"{document['code_bytes']} bytes",
        }


def source_of(spec: KernelSpec) -> Source:
    """Return the CUDA source of a kernel, with line directives if the settings want line info."""
    from mlagen.codegen.render import render
    from mlagen.settings import current_settings

    return render(spec, line_info=current_settings().line_info)


def ptx_of(spec: KernelSpec) -> str:
    """Return the PTX of a kernel."""
    from mlagen.compiler.nvrtc import compile_to_ptx
    from mlagen.engine import key_of

    return compile_to_ptx(source_of(spec), spec.arch, _compiler_for(key_of(spec).toolchain))


def includes_of(spec: KernelSpec) -> list[str]:
    """Return the templates that a kernel includes, in the order of their first line."""
    return files_of(spec)[:-1]


def files_of(spec: KernelSpec) -> list[str]:
    """Return the templates that a kernel is made of; its own comes last."""
    files = (origin.rpartition(":")[0] for origin in source_of(spec).origins if origin)
    return list(dict.fromkeys(files))


def tile_of(spec: KernelSpec) -> dict[str, int]:
    """Return the rows, the tokens and the stages of a tile that are numbers in the source."""
    numbers = {name: int(value) for name, value in _CONSTANT.findall(source_of(spec).text)}
    return {name: numbers[constant] for name, constant in _TILE.items() if constant in numbers}


def code_bytes(cubin: bytes) -> int:
    """Return the size of the SASS: of the ``.text`` sections of an ELF file.

    Raises DamageError if the bytes are no such file.
    """
    try:
        (table,) = struct.unpack_from("<Q", cubin, 40)
        header_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 58)
        places = [table + header_bytes * index for index in range(count)]
        headers = [struct.unpack_from("<IIQQQQ", cubin, place) for place in places]
        names = headers[names_index][4]
        code = [header for header in headers if cubin.startswith(b".text.", names + header[0])]
        is_whole = bool(code) and all(start + size <= len(cubin) for *_, start, size in code)
    except Exception:  # noqa: BLE001 - wild numbers raise one of several
        is_whole = False
    if not is_whole:
        raise DamageError(f"{CUBIN}: expected an ELF file with its sections inside, got another")
    return sum(size for *_, size in code)


def _cached_code_bytes(entry: CacheEntry) -> int:
    assert entry.path is not None, entry
    try:
        return code_bytes(entry.cubin)
    except DamageError as error:
        raise CacheError(f"cache: {error}: {entry.path}", path=entry.path) from error


def _compiler_for(wanted: str) -> Nvrtc:
    from mlagen.cache.key import CacheKey
    from mlagen.compiler.toolchain import find_nvrtc
    from mlagen.errors import ToolchainError

    nvrtc = find_nvrtc()
    if not CacheKey((), wanted).accepts(str(nvrtc)):
        raise ToolchainError(
            f"MLAGEN_TOOLCHAIN: expected {nvrtc}, which is installed, got {wanted}"
        )
    return nvrtc
