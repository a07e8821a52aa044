"""NVRTC compilation of a source to a cubin."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlagen.artifacts import Cubin, Resources, Source
from mlagen.compiler import nvrtc as nvrtc_module
from mlagen.compiler.nvrtc import (
    compile_source,
    load_nvrtc,
    parse_resources,
    rewrite_positions,
    supported_archs,
)
from mlagen.compiler.process import CompileProcesses
from mlagen.compiler.toolchain import Nvrtc, find_nvrtc
from mlagen.errors import CompileError, ToolchainError
from mlagen.spec.arch import ARCHS, Arch, parse_arch
from tests.cache.builds import ROOT, together
from tests.fixture_types import Log, Patch
from tests.kernels import require_known

KERNEL = 'extern "C" __global__ void probe(int* p) {\n  p[threadIdx.x] = 1;\n}\n'
# Every NVRTC from 12.8 on writes its version into the cubin of this one.
SM_100F = parse_arch("sm_100f")
Way = Callable[[Source, Arch, Nvrtc], Cubin]
WAYS: dict[str, Way] = {"here": compile_source, "its process": CompileProcesses().compile}


def source(text: str = KERNEL) -> Source:
    """Return a source whose line ``i`` comes from ``probe.cuh:10i``."""
    lines = text.count("\n")
    return Source(text=text, origins=tuple(f"probe.cuh:{10 * i}" for i in range(1, lines + 1)))


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_a_cubin_has_the_resources_of_ptxas(arch: Arch) -> None:
    """A cubin has its log, its resources and the version of the compiler that ran."""
    require_known(arch)
    nvrtc = find_nvrtc()

    cubin = compile_source(source(), arch, nvrtc)

    assert cubin.code.startswith(b"\x7fELF")
    assert b"probe" in cubin.code
    (resources,) = cubin.resources
    assert resources.symbol == "probe"
    assert resources.registers > 0
    assert not resources.has_spills
    assert cubin.toolchain == str(nvrtc)
    assert cubin.compile_ms > 0
    assert "Compiling entry function 'probe'" in cubin.log


def test_compiling_is_repeatable_and_runs_in_threads() -> None:
    """The same source gives the same bytes, also from eight threads concurrently."""
    nvrtc = find_nvrtc()
    cubins = together([lambda: compile_source(source(), SM_100F, nvrtc)] * 8)
    assert len({cubin.code for cubin in cubins}) == 1


@pytest.mark.parametrize("compiled", WAYS.values(), ids=WAYS)
def test_an_error_is_reported_in_the_template(compiled: Way) -> None:
    """The message is one line with the template position; log and source are attributes."""
    text = KERNEL.replace("p[threadIdx.x] = 1;", "undefined_name();")
    nvrtc = find_nvrtc()

    with pytest.raises(CompileError) as caught:
        compiled(source(text), SM_100F, nvrtc)

    position, problem = (
        "probe.cuh:20 (kernel.cu:2): error",
        'identifier "undefined_name" is undefined',
    )
    assert str(caught.value) == f"NVRTC {nvrtc.version}: {position}: {problem}"
    assert position in caught.value.log
    assert caught.value.source == text


def test_an_error_of_ptxas_is_reported() -> None:
    """The message is the ptxas error, although it has no source position."""
    text = KERNEL.replace("p[threadIdx.x] = 1;", 'asm volatile("not_an_instruction;");')
    with pytest.raises(CompileError) as caught:
        compile_source(source(text), SM_100F, find_nvrtc())
    assert "Not a name of any known instruction: 'not_an_instruction'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("kernel.cu(2): error: x\n", "probe.cuh:20 (kernel.cu:2): error: x\n"),
        (
            "kernel.cu(1): warning: a\nkernel.cu(3): error: b\n",
            "probe.cuh:10 (kernel.cu:1): warning: a\nprobe.cuh:30 (kernel.cu:3): error: b\n",
        ),
        ("kernel.cu(9): error: x\n", "kernel.cu:9: error: x\n"),
        ("my_kernel.cu(2): error: x\n", "my_kernel.cu(2): error: x\n"),
        ("ptxas fatal   : y\n", "ptxas fatal   : y\n"),
    ],
    ids=["one", "two", "past the last line", "another file", "no position"],
)
def test_positions_become_those_of_the_template(log: str, expected: str) -> None:
    """A position outside of the line map keeps its line in the rendered source."""
    rewritten = rewrite_positions(log, source().origins)
    assert rewritten == expected


@pytest.mark.parametrize("compiled", WAYS.values(), ids=WAYS)
def test_an_unknown_architecture_is_rejected(compiled: Way) -> None:
    """The message lists the supported architectures."""
    nvrtc = find_nvrtc()
    known = ", ".join(f"sm_{number}" for number in supported_archs(nvrtc))
    with pytest.raises(ToolchainError) as caught:
        compiled(source(), Arch(42), nvrtc)
    assert str(caught.value) == f"arch: NVRTC {nvrtc.version} compiles for {known}, got sm_42"


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "cannot open shared object file"), (b"text", "file too short")]
)
def test_a_library_that_cannot_be_loaded_is_named(
    content: bytes | None, reason: str, tmp_path: Path
) -> None:
    """The message has the file and the error of the loader."""
    path = tmp_path / "libnvrtc.so.13"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ToolchainError) as caught:
        compile_source(source(), SM_100F, replace(find_nvrtc(), path=path))
    assert str(caught.value).startswith(f"NVRTC: cannot load {path}: ")
    assert reason in str(caught.value)


def test_a_library_that_is_not_nvrtc_is_named() -> None:
    """A missing function is reported like a load failure."""
    library = Path(sys.modules["_ctypes"].__file__ or "")
    with pytest.raises(ToolchainError, match=rf"^NVRTC: cannot load {library}: .*nvrtc"):
        load_nvrtc(replace(find_nvrtc(), path=library))


@pytest.mark.parametrize("compiled", WAYS.values(), ids=WAYS)
def test_another_compiler_than_expected_is_logged(compiled: Way, caplog: Log) -> None:
    """The cubin has the version that compiled it, and a warning names both."""
    nvrtc_module._warn.cache_clear()
    real = find_nvrtc()
    other = f"{real.version}99"  # with the same minor version, and so the same options
    expected = replace(real, version=other, source="nvidia-cuda-nvrtc")

    cubin = compiled(source(), SM_100F, expected)

    assert cubin.toolchain == f"nvrtc-{real.version}"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"NVRTC: expected {other} from nvidia-cuda-nvrtc, but {real.version} compiled"
    )


def test_sources_cannot_include_files_of_the_current_folder(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    """Source, options and compiler are the whole input, whatever the current folder is."""
    (tmp_path / "local.cuh").write_text("#define LOCAL\n")  # would compile
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match=r"local\.cuh"):
        compile_source(source('#include "local.cuh"\n' + KERNEL), SM_100F, find_nvrtc())


STUB = """
#include <stdio.h>
#include <stdlib.h>
int cuInit(unsigned flags) {
  FILE* calls = fopen(getenv("STUB_CALLS"), "a");
  if (calls != NULL) {
    fprintf(calls, "cuInit %u\\n", flags);
    fclose(calls);
  }
  return 100; /* CUDA_ERROR_NO_DEVICE */
}
"""
COMPILE = """
from mlagen.engine import find_or_build
from tests.kernels import COMBINE
assert find_or_build(COMBINE).built
"""
CONTROL = "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)"
GCC = shutil.which("gcc")


@pytest.mark.skipif(GCC is None, reason="needs gcc, to build a stub of libcuda")
def test_compiling_never_initializes_the_driver(tmp_path: Path) -> None:
    """A compilation does not use the GPU: neither it nor the cache of NVRTC calls cuInit."""
    library, calls = tmp_path / "libcuda.so.1", tmp_path / "calls"
    (tmp_path / "stub.c").write_text(STUB)
    subprocess.run(
        [str(GCC), "-shared", "-fPIC", "-o", library, tmp_path / "stub.c"], check=True, cwd=tmp_path
    )
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "STUB_CALLS": str(calls)}

    subprocess.run([sys.executable, "-c", COMPILE], env=environ, cwd=ROOT, check=True)
    called_by_build = calls.exists()
    subprocess.run([sys.executable, "-c", CONTROL], env=environ, cwd=ROOT, check=True)

    assert not called_by_build
    assert calls.read_text() == "cuInit 0\n"


LOG_12_8 = """\
ptxas info    : 32 bytes gmem, 64 bytes cmem[4]
ptxas info    : Compiling entry function 'combine' for 'sm_80'
ptxas info    : Function properties for combine
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 2064 bytes smem, 424 bytes cmem[0]
ptxas info    : Compile time = 24.113 ms
"""

LOG_13_0 = """\
ptxas info    : 120 bytes gmem, 240 bytes cmem[4]
ptxas info    : Compiling entry function 'mla_sm80' for 'sm_80'
ptxas info    : Function properties for mla_sm80
ptxas         .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 249 registers, used 1 barriers, 528 bytes cmem[0], 32 bytes cmem[2]
ptxas info    : Compile time = 326.021 ms
"""

LOG_13_5 = """\
ptxas info    : (C7517) wgmma.wait_group is injected in around line 36 by compiler to allow use \
of registers defined by GMMA in function 'wide'
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the wgmma pipeline in the function 'wide' in line 34
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the wgmma pipeline in the function 'wide' in line 58
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'narrow' for 'sm_90a'
ptxas info    : Function properties for narrow
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compile time = 1.447 ms
ptxas info    : Compiling entry function 'wide' for 'sm_90a'
ptxas info    : Function properties for wide
ptxas         .     256 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 256 bytes cumulative stack size, 400 bytes smem
ptxas info    : Compile time = 5.755 ms
ptxas info    : Function properties for _Z1fPii
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def resources(symbol: str, registers: int, *sizes: int) -> Resources:
    """Return resources with the sizes in the order of the log: stack, stores, loads, shared."""
    stack_bytes, store_bytes, load_bytes, shared_bytes = sizes
    return Resources(
        symbol=symbol,
        registers=registers,
        stack_bytes=stack_bytes,
        spill_store_bytes=store_bytes,
        spill_load_bytes=load_bytes,
        static_shared_bytes=shared_bytes,
    )


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (LOG_12_8, (resources("combine", 32, 0, 0, 0, 2064),)),
        (LOG_13_0, (resources("mla_sm80", 249, 16, 12, 8, 0),)),
        (LOG_13_5, (resources("narrow", 8, 0, 0, 0, 0), resources("wide", 32, 256, 0, 0, 400))),
        ("", ()),
    ],
    ids=["12.8", "13.0", "13.5 with two kernels and a function", "an empty log"],
)
def test_resources_of_every_kernel_in_a_log(log: str, expected: tuple[Resources, ...]) -> None:
    """Registers, stack, spills and static shared memory, for entry functions only."""
    found = parse_resources(log)
    assert found == expected
    assert [one.has_spills for one in found] == [one.spill_store_bytes > 0 for one in expected]
