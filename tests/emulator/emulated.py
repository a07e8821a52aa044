"""CPU emulator of kernels: rendered as for a GPU, compiled with fibers for threads.

``instructions.h`` replaces the wrappers in ``templates/ptx``; everything else is the kernel's own
source. CTAs, warps and copies proceed in random order and at random speed. A misaligned or
conflicting access, an extra arrival, a missing proxy fence before wgmma, a deadlock or a copy
that outlives its CTA is an error. Copies by cp.async come when their thread waits for them.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest

from mlagen.artifacts import Source
from mlagen.codegen.render import render
from mlagen.codegen.sources import template_root
from mlagen.families.common import launchers, plan_sm80
from mlagen.runtime.device import DeviceFacts
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.tensor_map import TiledTensor
from mlagen.spec.kernel import KernelSpec
from tests.built_once import built_once

COMPILER = shutil.which("g++")

_FOLDER = Path(__file__).parent
# Without fortification: glibc's check of longjmp does not support several stacks.
_OPTIONS = (
    *("-std=c++20", "-O1", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-w", "-fPIC", "-fno-exceptions", "-fvisibility=hidden", "-U_FORTIFY_SOURCE"),
    *("-fno-tree-pta", "-fno-tree-dominator-opts"),  # which take longer than they save
    *(["-fuse-ld=gold"] if shutil.which("ld.gold") else []),  # in a third of the time of ld
)
_MAP_BYTES = 128
_STACK_STRIDE = 256 * 1024 + 4096 + 192  # kStackStride
_KEPT_BYTES = 16384 * _STACK_STRIDE  # of which a thread uses some pages
_MAP_NORESERVE = 0x4000  # a name of the module since Python 3.13
_kept_stacks: list[mmap.mmap] = []

# Shared memory: the emulator has one for each block, at `bytes`.
_DYNAMIC_SHARED = "extern __shared__ __align__(1024) unsigned char bytes[];"
_STATIC_SHARED = re.compile(r"__shared__ (\w+) (\w+);")


Case = TypeVar("Case")


@dataclass(frozen=True)
class Emulated(Generic[Case]):
    """A case, how many SMs there are, and whether an sm80 kernel may convert e4m3 in hardware."""

    case: Case
    sm_count: int = 1
    has_cvt_e4m3: bool = False


def launch(spec: KernelSpec, params: bytes, blocks: int, seed: int) -> None:
    """Run a grid.

    Raises
    ------
    AssertionError
        If the kernel does something that is not allowed.
    """
    stacks = _stacks(blocks * spec.threads * _STACK_STRIDE)
    complaint = _library(spec).launch_emulated(params, blocks, spec.threads, seed, stacks)
    if len(_kept_stacks[0]) > _KEPT_BYTES:
        _kept_stacks[0].madvise(mmap.MADV_DONTNEED, _KEPT_BYTES)
    if complaint:
        raise AssertionError(f"{spec}: {complaint.decode()}")


def _stacks(size: int) -> ctypes.c_void_p:
    """Return memory for the stacks of all threads, of which the first stay mapped for all launches.

    Page faults of new ones take longer than most launches.
    """
    if not _kept_stacks or len(_kept_stacks[0]) < size:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        _kept_stacks[:] = [mmap.mmap(-1, size, flags=flags)]
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(_kept_stacks[0])))


def replace_launches(patch: pytest.MonkeyPatch, plan: Any, *, sm_count: int, seed: int) -> None:
    """Emulate the launches of calls, and let ``plan`` see a GPU of ``sm_count`` SMs."""
    facts = DeviceFacts(index=0, name="", major=9, minor=0, sm_count=sm_count, memory_bytes=0)

    def emulate(kernel: LoadedKernel, blocks: int, _: bool, values: tuple[Any, ...]) -> None:
        launch(kernel.spec, kernel.packing.struct.pack(*values), blocks, seed)

    for module in (plan, plan_sm80):
        patch.setattr(module, "device_facts", lambda _: facts)
    patch.setattr(launchers, "launch", emulate)


@cache
def _library(spec: KernelSpec) -> ctypes.CDLL:
    library = compile_host(source_of(spec))
    library.launch_emulated.restype = ctypes.c_char_p
    return library


@cache
def _toolchain() -> tuple[str | bytes, ...]:
    """Return all that a library is made of besides its source."""
    assert COMPILER is not None
    version = subprocess.run([COMPILER, "--version"], check=True, capture_output=True).stdout
    cpu = re.findall(r"^flags.*", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[:1]
    files = (Path(__file__), *sorted(_FOLDER.glob("*.h")))  # this one has more options
    return (version, *cpu, *_OPTIONS, _types(), *(file.read_bytes() for file in files))


def compile_host(source: str) -> ctypes.CDLL:
    """Compile C++ that begins with fibers.h into a library, and load it."""
    # The compiler reads it in place of fibers.h, for a third less time.
    header = built_once("fibers.h.gch", _precompile, made_of=_toolchain())
    grid = built_once("grid.o", _compile_grid, made_of=_toolchain())

    def build(library: Path) -> None:
        file = library.with_suffix(".cpp")
        file.write_text(source)
        _compile("-shared", str(file), str(grid), "-o", str(library), "-I", str(header.parent))

    return ctypes.CDLL(str(built_once("kernel.so", build, made_of=(*_toolchain(), source))))


def _types() -> str:
    return (template_root() / "common/types.cuh").read_text().replace(_DYNAMIC_SHARED, "")


def _precompile(header: Path) -> None:
    _compile("-x", "c++-header", str(_FOLDER / "fibers.h"), "-o", str(header))


def _compile_grid(output: Path) -> None:
    file = output.with_suffix(".cpp")
    file.write_text(f'#include "fibers.h"\n{_types()}\n#include "grid.h"\n')
    # Where the most time passes, in loops over columns of accumulators.
    _compile("-O3", "-fno-trapping-math", "-c", str(file), "-o", str(output))


def _compile(*arguments: str) -> None:
    assert COMPILER is not None
    subprocess.run([COMPILER, *_OPTIONS, *arguments, "-I", str(_FOLDER)], check=True)


def is_of_types(origin: str) -> bool:
    """Whether a line came from the types that ``instructions.h`` is written in."""
    return origin.startswith("common/types.cuh:")


def source_of(spec: KernelSpec) -> str:
    """Return the kernel as C++ that launches itself."""
    return "\n".join(
        [host_source(render(spec)), f"#define EMULATED {spec.symbol}", '#include "launch.h"', ""]
    )


def host_source(source: Source) -> str:
    """Return CUDA as C++, with the emulator's instructions instead of PTX."""
    lines = ['#include "fibers.h"']
    origin_before = ""
    for line, origin in zip(source.text.splitlines(), source.origins, strict=True):
        if is_of_types(origin_before) and not is_of_types(origin):
            lines += ['#include "instructions.h"', '#include "warpgroups.h"']
        origin_before = origin
        if not origin.startswith("ptx/"):
            lines.append(_STATIC_SHARED.sub(r"\1& \2 = shared_memory<\1>();", line))
    return "\n".join(lines).replace(_DYNAMIC_SHARED, "")


def encode(tensor: TiledTensor, address: int) -> bytes:
    """Return the TMA descriptor, of up to five dimensions, that ``instructions.h`` reads."""
    assert address % 16 == 0
    assert not any(stride % 16 for stride in tensor.strides)
    element_bytes = tensor.element_bytes
    more = 5 - len(tensor.sizes)
    box, sizes = (*tensor.box, *(1,) * more), (*tensor.sizes, *(1,) * more)
    strides = (*tensor.strides, *(0,) * more)
    packed = struct.pack(
        "<Qi5i5ii4q", address, element_bytes, *box, *sizes, tensor.has_words, *strides
    )
    return packed.ljust(_MAP_BYTES, b"\0")
