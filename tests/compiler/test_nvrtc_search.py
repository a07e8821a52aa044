"""NVRTC search outside of wheels; the file that is found is the one that compiles."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlagen.compiler import nvrtc_search
from mlagen.compiler.nvrtc_search import Candidate, find_candidates
from mlagen.compiler.toolchain import find_nvrtc
from tests.cache.builds import ROOT
from tests.fixture_types import Patch

VARIABLES = ("CONDA_PREFIX", "LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME")
BANNER = b"Cuda compilation tools, release %s, V%s"


def elf_file(path: Path) -> Path:
    """Create a file with the ELF header of a library for this machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(Path(sys.executable).resolve().read_bytes()[:64])
    return path


def make_library(folder: Path, version: str = "13.1.80") -> Path:
    """Create a libnvrtc.so.13 whose version is inside the file only."""
    path = elf_file(folder / "libnvrtc.so.13")
    release = version.rpartition(".")[0].encode()
    header = path.read_bytes()
    path.write_bytes(header + BANNER % (b"%d.%d", b"") + BANNER % (release, version.encode()))
    return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Return the root of a machine without NVRTC."""
    monkeypatch.setattr(nvrtc_search, "_ROOT", tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


# Variables, files with their content, and the folder of the library.
PLACES: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "the dynamic loader's folders": ({"LD_LIBRARY_PATH": "relative::{0}/a:{0}/b"}, {}, "b"),
    "a folder of its configuration": (
        {},
        {"etc/ld.so.conf.d/cuda.conf": "# CUDA\n{0}/opt/cuda\n"},
        "opt/cuda",
    ),
    "CUDA_HOME": ({"CUDA_HOME": "{0}/cuda"}, {}, "cuda/lib64"),
    "CUDA_PATH": ({"CUDA_PATH": "{0}/cuda"}, {}, "cuda/lib"),
    "a target of a toolkit": ({"CUDA_HOME": "{0}/cuda"}, {}, "cuda/targets/x86_64-linux/lib"),
    "a target of an Arm server": ({"CUDA_HOME": "{0}/cuda"}, {}, "cuda/targets/sbsa-linux/lib"),
    "an active conda environment": ({"CONDA_PREFIX": "{0}/conda"}, {}, "conda/lib"),
    "its target": ({"CONDA_PREFIX": "{0}/conda"}, {}, "conda/targets/x86_64-linux/lib"),
    "the conda environment of this Python": ({}, {"env/conda-meta/history": ""}, "env/lib"),
    "a versioned toolkit": ({}, {}, "usr/local/cuda-13.2/lib64"),
    "the toolkit": ({}, {}, "usr/local/cuda/targets/sbsa-linux/lib"),
    "a distribution's folder": ({}, {}, "usr/lib/aarch64-linux-gnu"),
    "another distribution's": ({}, {}, "usr/lib64"),
}


@pytest.mark.parametrize(("environ", "files", "folder"), PLACES.values(), ids=PLACES)
def test_a_library_without_a_version_in_its_name_is_found(
    environ: dict[str, str], files: dict[str, str], folder: str, machine: Path, monkeypatch: Patch
) -> None:
    """The version of a plain libnvrtc.so.13 is read from the file."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value.format(machine))
    for name, content in files.items():
        (machine / name).parent.mkdir(parents=True)
        (machine / name).write_text(content.format(machine))
    path = make_library(machine / folder)
    (found,) = find_candidates(13, ())
    assert found == Candidate("13.1.80", path, "system")


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("value", ["relative", ".", ""], ids=repr)
def test_a_relative_folder_is_not_searched(
    variable: str, value: str, machine: Path, monkeypatch: Patch
) -> None:
    """A library of the current folder is not loaded, whatever a variable says."""
    for folder in ("relative", "relative/lib", "lib", "."):
        make_library(machine / folder)
    monkeypatch.chdir(machine)
    monkeypatch.setenv(variable, value)
    assert list(find_candidates(13, ())) == []


def test_the_search_order(machine: Path, monkeypatch: Patch) -> None:
    """The order is Conda, folders of the loader, the configured toolkit, the newest one."""
    places = ("conda/lib", "ld", "cuda/lib64", "usr/local/cuda-13.10/lib64")
    paths = [make_library(machine / place) for place in (*places, "usr/local/cuda-13.2/lib64")]
    monkeypatch.setenv("CONDA_PREFIX", str(machine / "conda"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(machine / "ld"))
    monkeypatch.setenv("CUDA_HOME", str(machine / "cuda"))
    assert [found.path for found in find_candidates(13, ())] == paths


def test_unloadable_files_are_skipped(machine: Path, monkeypatch: Patch) -> None:
    """Foreign or unversioned libraries, folders, link loops and empty files are skipped."""
    other = make_library(machine / "other")
    content = bytearray(other.read_bytes())
    content[18] ^= 0xFF  # the machine field of an ELF header
    other.write_bytes(content)
    (machine / "folder/libnvrtc.so.13").mkdir(parents=True)
    for name in ("loop", "empty"):
        (machine / name).mkdir()
    (machine / "loop/libnvrtc.so.13").symlink_to("libnvrtc.so.13")
    (machine / "empty/libnvrtc.so.13").touch()
    elf_file(machine / "unknown/libnvrtc.so.13")
    valid = make_library(machine / "valid")
    names = ("other", "folder", "loop", "empty", "unknown", "gone", "valid")
    monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(str(machine / name) for name in names))

    assert [found.path for found in find_candidates(13, ())] == [valid]


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CONDA_PREFIX", "LD_LIBRARY_PATH"])
def test_a_folder_that_cannot_be_searched_is_skipped(
    variable: str, machine: Path, monkeypatch: Patch
) -> None:
    """Any file-system error skips to the next folder."""
    valid = make_library(machine / "usr/lib64")
    (machine / "file").touch()
    real = Path.open

    def reject(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.is_relative_to("/nowhere"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", reject)

    for place in (machine / "file", "/" + "x" * 300, "/nowhere"):
        monkeypatch.setenv(variable, str(place))

        assert [found.path for found in find_candidates(13, ())] == [valid]


# argv: what hides the wheels. Compiles here and in a fresh process; prints what was found and
# which libraries are in the process.
COMPILE = """
import json, re, sys
from importlib import metadata
from pathlib import Path
real = metadata.distribution
def distribution(name):
    if "nvrtc" in name:
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.distribution = distribution
from mlagen.compiler.nvrtc_process import compile_anywhere, compile_in_process
from mlagen.compiler.toolchain import find_nvrtc
from tests.compiler.test_nvrtc import SM_100F, source
nvrtc = find_nvrtc()
made = [compiled(source(), SM_100F, nvrtc) for compiled in (compile_anywhere, compile_in_process)]
maps = Path("/proc/self/maps").read_text()
print(json.dumps({
    "found": [nvrtc.version, str(nvrtc.path)],
    "toolchains": [cubin.toolchain for cubin in made],
    "is_same": made[0].code == made[1].code,
    "mapped": sorted(set(re.findall(r"\\S*libnvrtc\\S*", maps))),
}))
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the installed NVRTC and its builtins, and nothing else."""
    folder = tmp_path_factory.mktemp("toolkit") / "lib64"
    folder.mkdir()
    installed = find_nvrtc().path
    major, minor = find_nvrtc().release
    shutil.copy(installed, folder / f"libnvrtc.so.{major}")
    shutil.copy(installed.with_name(f"libnvrtc-builtins.so.{major}.{minor}"), folder)
    return folder


def report_of(code: str, **variables: str) -> Any:
    """Return what a program prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("variable", ["LD_LIBRARY_PATH", "CUDA_HOME"])
def test_the_file_that_is_found_is_the_one_that_is_loaded(variable: str, copied: Path) -> None:
    """It is loaded with its own builtins and without another NVRTC, also in a fresh process."""
    value = copied if variable == "LD_LIBRARY_PATH" else copied.parent

    report = report_of(COMPILE, **{"LD_LIBRARY_PATH": "", variable: str(value)})

    version = find_nvrtc().version
    assert report["found"] == [version, str(copied / f"libnvrtc.so.{find_nvrtc().release[0]}")]
    assert report["toolchains"] == [f"nvrtc-{version}"] * 2
    assert report["is_same"]
    assert report["mapped"] == sorted(str(path) for path in copied.iterdir())


def test_the_wheel_is_loaded_whatever_the_loader_would_find(copied: Path) -> None:
    """LD_LIBRARY_PATH overrides neither the NVRTC of the wheel nor its builtins."""
    if find_nvrtc().source == "system":
        pytest.skip("the installed NVRTC comes from no wheel")

    with_wheels = COMPILE.replace('if "nvrtc" in name', "if False")
    report = report_of(with_wheels, LD_LIBRARY_PATH=str(copied))

    folder = find_nvrtc().path.parent
    assert report["found"][1] == str(find_nvrtc().path)
    assert {Path(path).parent for path in report["mapped"]} == {folder}
