"""Toolchain selection: the NVRTC that is found, the errors without one, and its options."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from mlagen.compiler import toolchain
from mlagen.compiler.toolchain import (
    Nvrtc,
    _candidates,
    find_nvrtc,
    options_for,
    wanted_toolchain,
)
from mlagen.errors import ToolchainError
from mlagen.spec.arch import parse_arch
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
    monkeypatch.setattr(toolchain, "_WHEEL", "no-wheel")
    monkeypatch.setattr(toolchain, "_ROOT", tmp_path)
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
    (found,) = _candidates(13)
    assert found == Nvrtc(version="13.1.80", path=path, source="system")


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
    assert list(_candidates(13)) == []


def test_the_search_order(machine: Path, monkeypatch: Patch) -> None:
    """The order is Conda, folders of the loader, the configured toolkit, the newest one."""
    places = ("conda/lib", "ld", "cuda/lib64", "usr/local/cuda-13.10/lib64")
    paths = [make_library(machine / place) for place in (*places, "usr/local/cuda-13.2/lib64")]
    monkeypatch.setenv("CONDA_PREFIX", str(machine / "conda"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(machine / "ld"))
    monkeypatch.setenv("CUDA_HOME", str(machine / "cuda"))
    assert [found.path for found in _candidates(13)] == paths


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

    assert [found.path for found in _candidates(13)] == [valid]


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

        assert [found.path for found in _candidates(13)] == [valid]


CU12, CU13 = "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"


@dataclass(frozen=True)
class FakeDistribution:
    """An installed wheel, with its library in ``folder``."""

    version: str
    folder: Path
    library: str

    @property
    def files(self) -> list[PurePosixPath]:
        """The files in the record of the wheel."""
        return [PurePosixPath("nvidia/LICENSE"), PurePosixPath(f"nvidia/lib/{self.library}")]

    def locate_file(self, file: PurePosixPath) -> Path:
        """Return the path of a listed file."""
        return self.folder / file


@pytest.fixture
def bare(monkeypatch: Patch) -> Iterator[Patch]:
    """Hide the NVRTC libraries of the system."""
    monkeypatch.setattr(toolchain, "_system_folders", lambda _: iter(()))
    find_nvrtc.cache_clear()
    wanted_toolchain.cache_clear()
    yield monkeypatch
    find_nvrtc.cache_clear()
    wanted_toolchain.cache_clear()


def install(
    monkeypatch: Patch, folder: Path, bindings: str | None, wheels: Mapping[str, str]
) -> None:
    """Simulate a version of cuda-bindings, and NVRTC wheels by name and version."""
    known = {}
    for name, text in wheels.items():
        wheel = FakeDistribution(text, folder / name, f"libnvrtc.so.{text.partition('.')[0]}")
        library = wheel.locate_file(wheel.files[-1])
        library.parent.mkdir(parents=True)
        library.touch()
        known[name] = wheel

    def distribution(name: str) -> FakeDistribution:
        if name not in known:
            raise metadata.PackageNotFoundError(name)
        return known[name]

    def version(name: str) -> str:
        if bindings is None:
            raise metadata.PackageNotFoundError(name)
        return bindings

    monkeypatch.setattr(metadata, "distribution", distribution)
    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("bindings", "name", "declared", "version"),
    [
        ("13.4.4", CU13, "13.5.37", "13.5.37"),
        ("12.9.1", CU12, "12.8.93", "12.8.93"),
        ("14.0.0", CU13, "14.0.1", "14.0.1"),
        ("13.4.4", CU13, "13.5.37.post1+acme.2", "13.5.37"),
    ],
    ids=["CUDA 13", "CUDA 12", "a future major version", "a rebuilt wheel"],
)
def test_the_wheel_of_the_bindings_major_version_is_found(
    bindings: str, name: str, declared: str, version: str, bare: Patch, tmp_path: Path
) -> None:
    """Version, file and origin come from the record of the wheel; nothing is loaded."""
    install(bare, tmp_path, bindings, {name: declared})
    found = find_nvrtc()
    library = f"libnvrtc.so.{version.partition('.')[0]}"
    assert found.version == version
    assert found.path == (tmp_path / name / "nvidia/lib" / library).resolve()
    assert found.source == name
    assert str(found) == f"nvrtc-{version}"


NO_NVRTC = (
    "NVRTC: no libnvrtc.so.{0} found for cuda-bindings {0}; run: pip install nvidia-cuda-nvrtc"
)
NO_BINDINGS = "cuda-bindings: not installed; run: pip install cuda-python"
TOO_OLD = (
    f"NVRTC: expected 12.8 or newer, got 12.6.85 in {{}}/{CU12}/nvidia/lib/libnvrtc.so.12; "
    f"run: pip install -U {CU12}"
)
ERRORS: dict[str, tuple[str | None, dict[str, str], str]] = {
    "no bindings": (None, {CU13: "13.5.37"}, NO_BINDINGS),
    "CUDA 13": ("13.4.4", {}, NO_NVRTC.format(13)),
    "CUDA 12": ("12.9.1", {}, f"{NO_NVRTC.format(12)}-cu12"),
    "NVRTC of another major version": ("13.4.4", {CU12: "12.9.86"}, NO_NVRTC.format(13)),
    "NVRTC that is too old": ("12.9.1", {CU12: "12.6.85"}, TOO_OLD),
}


@pytest.mark.parametrize(("bindings", "wheels", "message"), ERRORS.values(), ids=ERRORS)
def test_without_nvrtc_the_message_has_the_command(
    bindings: str | None, wheels: dict[str, str], message: str, bare: Patch, tmp_path: Path
) -> None:
    """The message names the wheel for the installed bindings, and an installed version."""
    install(bare, tmp_path, bindings, wheels)
    failing: list[Callable[[], object]] = [find_nvrtc, partial(wanted_toolchain, "exact")]
    if bindings is None:
        failing.append(partial(wanted_toolchain, "compatible"))
    for find in failing:
        with pytest.raises(ToolchainError) as caught:
            find()
        assert str(caught.value) == message.format(tmp_path.resolve())


def test_a_later_nvrtc_that_is_new_enough_is_used(monkeypatch: Patch, tmp_path: Path) -> None:
    """The wheel of a newer toolkit is used beside the old wheel that torch pins."""
    install(monkeypatch, tmp_path, "12.9.1", {CU12: "12.4.127"})
    library = elf_file(tmp_path / "cuda/lib64/libnvrtc.so.12.9.86")
    library.with_name("libnvrtc.so.12").symlink_to(library.name)
    monkeypatch.setattr(toolchain, "_system_folders", lambda _: iter([library.parent]))
    found = find_nvrtc.__wrapped__()
    assert (found.version, found.path) == ("12.9.86", library)


@pytest.mark.parametrize(
    ("arch", "version", "target", "has_cache_option"),
    [
        ("sm_80", "12.8.93", "sm_80", False),
        ("sm_90a", "12.8.93", "sm_90a", False),
        ("sm_100f", "12.8.93", "sm_100a", False),
        ("sm_120f", "12.8.93", "sm_120a", False),
        ("sm_100f", "12.9.86", "sm_100f", True),
        ("sm_121f", "13.5.37", "sm_121f", True),
    ],
)
def test_options_of_a_version(arch: str, version: str, target: str, has_cache_option: bool) -> None:
    """Family suffixes and the option that disables the cache of NVRTC exist from 12.9 on."""
    options = options_for(parse_arch(arch), f"nvrtc-{version}")
    assert options[0] == f"--gpu-architecture={target}"
    assert ("--no-cache" in options) is has_cache_option


@pytest.mark.parametrize(
    ("policy", "wheels", "toolchain"),
    [
        ("auto", {CU13: "13.5.37"}, "nvrtc-13.5.37"),
        ("auto", {}, "nvrtc-13"),
        ("exact", {CU13: "13.5.37"}, "nvrtc-13.5.37"),
        ("compatible", {CU13: "13.5.37"}, "nvrtc-13"),
        ("compatible", {}, "nvrtc-13"),
        ("nvrtc-13.0.88", {CU13: "13.5.37"}, "nvrtc-13.0.88"),
        ("nvrtc-13.0.88", {}, "nvrtc-13.0.88"),
    ],
)
def test_the_toolchain_of_a_policy(
    policy: str, wheels: Mapping[str, str], toolchain: str, bare: Patch, tmp_path: Path
) -> None:
    """A policy selects the installed compiler, any of its major version, or a named one."""
    install(bare, tmp_path, "13.4.4", wheels)
    assert wanted_toolchain(policy) == toolchain


def test_a_missing_compiler_is_searched_once(bare: Patch, tmp_path: Path) -> None:
    """The second key of a process without a compiler reads no metadata."""
    install(bare, tmp_path, "13.4.4", {})
    first = wanted_toolchain("auto")
    bare.setattr(toolchain, "metadata", None)
    assert wanted_toolchain("auto") == first


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
def test_a_major_version_has_the_options_of_the_newest(arch: str) -> None:
    """A key without a minor version matches the options of any recent one."""
    options = options_for(parse_arch(arch), "nvrtc-13")
    assert options == options_for(parse_arch(arch), "nvrtc-13.0.88")
    assert options == options_for(parse_arch(arch), "nvrtc-12")
    assert options != options_for(parse_arch(arch), "nvrtc-12.8.93")
