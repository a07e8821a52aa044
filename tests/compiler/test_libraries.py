"""Several NVRTCs on a machine and in a process: the one that is found is the one that compiles."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlagen.compiler.toolchain import find_nvrtc
from tests.cache.builds import ROOT

# argv: files to load before, each with its mode, and whether the wheel is hidden. Prints what was
# found, the compiler, whether it ran in this process, and the libraries that are in it.
COMPILE = """
import ctypes, json, re, sys
from importlib import metadata
from pathlib import Path
loaded, mode, hides_wheel, executable = sys.argv[1:]
real = metadata.distribution
def distribution(name):
    if hides_wheel and "nvrtc" in name:
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.distribution = distribution
if loaded:
    ctypes.CDLL(loaded, mode=getattr(ctypes, mode))
from mlagen.compiler import process
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.errors import ToolchainError
from mlagen.artifacts import Source
from mlagen.spec.arch import Arch
source = Source(text='extern "C" __global__ void probe() {}', origins=("probe.cuh:1",))
nvrtc, started = find_nvrtc(), []
compile_apart = process.CompileProcesses.compile
process.CompileProcesses.compile = lambda *given: started.append(1) or compile_apart(*given)
sys.executable = executable or sys.executable
try:
    answer = process.compile_anywhere(source, Arch(100, "f"), nvrtc).toolchain
except ToolchainError as error:
    answer = str(error)
print(json.dumps({
    "found": str(nvrtc.path),
    "answer": answer,
    "is_apart": bool(started),
    "mapped": sorted(set(re.findall(r"\\S*libnvrtc\\S*", Path("/proc/self/maps").read_text()))),
}))
"""
VERSION = find_nvrtc().version
LIBRARY = f"libnvrtc.so.{find_nvrtc().release[0]}"


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the installed NVRTC and its builtins, and nothing else."""
    folder = tmp_path_factory.mktemp("toolkit") / "lib64"
    folder.mkdir()
    installed = find_nvrtc().path
    major, minor = find_nvrtc().release
    shutil.copy(installed, folder / LIBRARY)
    shutil.copy(installed.with_name(f"libnvrtc-builtins.so.{major}.{minor}"), folder)
    return folder


def compiled(
    loaded: object = "",
    mode: str = "RTLD_LOCAL",
    *,
    hides_wheel: bool = False,
    executable: str = "",
    **variables: str,
) -> Any:
    """Return the report of a process that compiles."""
    arguments = [str(loaded), mode, "1" if hides_wheel else "", executable]
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *arguments],
        env={**os.environ, "LD_LIBRARY_PATH": "", **variables},
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.parametrize("place", ["the loader's", "a toolkit's", "a linked toolkit's"])
def test_an_nvrtc_without_a_wheel_compiles(place: str, copied: Path, tmp_path: Path) -> None:
    """It is loaded with its own builtins and without another NVRTC."""
    if place == "the loader's":
        report = compiled(hides_wheel=True, LD_LIBRARY_PATH=str(copied))
    elif place == "a toolkit's":
        report = compiled(hides_wheel=True, CUDA_HOME=str(copied.parent))
    else:
        folder = tmp_path / "cuda-13/targets/x86_64-linux/lib"
        folder.mkdir(parents=True)
        (folder / f"{LIBRARY}.1.2").symlink_to(copied / LIBRARY)
        (folder / LIBRARY).symlink_to(f"{LIBRARY}.1.2")
        report = compiled(hides_wheel=True, CUDA_PATH=str(tmp_path / "cuda-13"))

    assert report == {
        "found": str(copied / LIBRARY),
        "answer": f"nvrtc-{VERSION}",
        "is_apart": False,
        "mapped": sorted(str(path) for path in copied.iterdir()),
    }


@pytest.mark.skipif(find_nvrtc().source == "system", reason="NVRTC comes from no wheel")
@pytest.mark.parametrize(
    ("before", "mode", "is_apart"),
    [
        ("nothing", "RTLD_LOCAL", False),
        ("the wheel's", "RTLD_LOCAL", False),
        ("the wheel's", "RTLD_GLOBAL", False),
        ("another", "RTLD_LOCAL", True),
        ("another", "RTLD_GLOBAL", True),
    ],
)
def test_the_wheel_compiles_whatever_is_loaded(
    before: str, mode: str, is_apart: bool, copied: Path
) -> None:
    """As by torch: if the bindings would call another library, a process of its own compiles.

    LD_LIBRARY_PATH names another one, which overrides neither NVRTC nor its builtins.
    """
    wheel = find_nvrtc().path
    loaded = {"nothing": "", "the wheel's": wheel, "another": copied / LIBRARY}[before]

    report = compiled(loaded, mode, LD_LIBRARY_PATH=str(copied))

    assert report["found"] == str(wheel)
    assert (report["answer"], report["is_apart"]) == (f"nvrtc-{VERSION}", is_apart)
    if before != "another":
        assert {Path(path).parent for path in report["mapped"]} == {wheel.parent}


@pytest.mark.skipif(find_nvrtc().source == "system", reason="NVRTC comes from no wheel")
@pytest.mark.parametrize("way", ["every process has another", "no process can be started"])
def test_without_one_nvrtc_a_sentence_says_what_to_set(way: str, copied: Path) -> None:
    """It names the library that was found, the loaded one, and the variable."""
    other = copied / LIBRARY
    if way == "every process has another":
        report = compiled(LD_PRELOAD=str(other))
    else:
        report = compiled(other, "RTLD_GLOBAL", executable="/bin/false")

    wheel = find_nvrtc().path
    assert report["answer"] == (
        f"NVRTC: found {VERSION} in {wheel}, but this process has loaded {other}; "
        f"set LD_LIBRARY_PATH={wheel.parent} before it starts"
    )
