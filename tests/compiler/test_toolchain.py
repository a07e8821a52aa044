"""Toolchain selection: the NVRTC that is found, the errors without one, and its options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest

from mlagen.compiler import nvrtc_search, toolchain
from mlagen.compiler.toolchain import find_nvrtc, options_for, wanted_toolchain
from mlagen.errors import ToolchainError
from mlagen.spec.arch import parse_arch
from tests.compiler.test_nvrtc_search import elf_file
from tests.fixture_types import Patch

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
    monkeypatch.setattr(nvrtc_search, "_system_folders", lambda _: iter(()))
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
    monkeypatch.setattr(nvrtc_search, "_system_folders", lambda _: iter([library.parent]))
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
