"""`mlagen doctor`: what is there, and what is missing."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import mlagen
from cache_tools.commands import doctor
from mlagen.compiler import toolchain
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.prewarming import PrewarmReport
from mlagen.runtime import device
from mlagen.runtime.device import DeviceFacts
from mlagen.settings import current_settings

from .altered import move_to_layer
from .conftest import Run, damage


def document(run: Run) -> dict[str, Any]:
    """Return what the command says as JSON."""
    parsed: dict[str, Any] = json.loads(run("doctor", "--json").stdout)
    return parsed


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be no driver."""
    monkeypatch.setattr(device, "visible_devices", list)
    monkeypatch.setattr(device, "driver_version", lambda: None)


@pytest.mark.usefixtures("no_gpu")
def test_versions_and_places_are_told(run: Run, cache_dir: Path) -> None:
    """The document names every package, NVRTC's file, and the folders."""
    found = document(run)

    assert found["mlagen"] == mlagen.__version__
    assert found["packages"]["torch"] == metadata.version("torch")
    assert found["packages"]["filelock"] == metadata.version("filelock")
    assert found["nvrtc"]["version"] == find_nvrtc().version
    assert Path(found["nvrtc"]["path"]).is_file()
    assert (found["driver"], found["gpus"]) == (None, [])
    assert found["cache"] == {
        "path": str(cache_dir),
        "exists": False,
        "writable": True,
        "entries": 0,
        "damaged": 0,
        "size_bytes": 0,
    }
    assert found["locks"]["timeout_s"] == 300.0
    assert found["problems"] == []


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_a_gpu_is_sound(run: Run) -> None:
    """That there is no GPU is said, and is no problem."""
    result = run("doctor")

    facts = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert result.exit_code == 0
    assert facts["driver"] == "none"
    assert facts["GPUs"] == "none: kernels can be compiled, and tensors on the CPU computed"
    assert facts["problems"] == "none"


def test_the_cache_is_measured(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """Entries, their size, and the damaged ones are counted."""
    unit = cached.units[0]
    cubin = damage(unit.key, unit.toolchain, cache_dir)
    (cubin.parent / "manifest.json").write_text("{")

    cache = document(run)["cache"]

    assert (cache["exists"], cache["entries"], cache["damaged"]) == (True, 2, 1)
    assert cache["size_bytes"] > 10_000


def test_gpus_are_listed_with_their_targets(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that no target serves is a problem."""
    facts = {"sm_count": 132, "memory_bytes": 150_121_000_000}
    gpus = [
        DeviceFacts(index=0, name="NVIDIA H200", major=9, minor=0, **facts),
        DeviceFacts(index=1, name="Tesla T4", major=7, minor=5, **facts),
    ]
    monkeypatch.setattr(device, "visible_devices", lambda: gpus)
    monkeypatch.setattr(device, "driver_version", lambda: "13.0")

    result = run("doctor")

    assert result.exit_code == 1
    assert "serves CUDA 13.0" in result.stdout
    assert "NVIDIA H200, sm_90a, 132 SMs, 139.8 GiB" in result.stdout
    assert "Tesla T4, not supported, 132 SMs, 139.8 GiB" in result.stdout
    assert "Tesla T4: device: expected compute capability " in result.stdout


def test_a_missing_nvrtc_is_told_with_its_cure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of the error is the problem, and the exit code is 1."""

    def missing() -> None:
        raise mlagen.ToolchainError("NVRTC: not found; run: pip install nvidia-cuda-nvrtc")

    monkeypatch.setattr(toolchain, "find_nvrtc", missing)

    result = run("doctor")

    assert result.exit_code == 1
    assert "NVRTC: not found; run: pip install nvidia-cuda-nvrtc" in result.stdout


def test_a_missing_package_is_told_with_its_cure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each package that is not installed has a line that says how to get it; stderr has it too."""
    monkeypatch.setattr(doctor, "_REQUIRED", ("click", "no-such-package"))

    result = run("doctor", "--json")

    problem = "no-such-package: not installed; run: pip install no-such-package"
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problems"] == [problem]
    assert result.stderr == f"problem: {problem}\n"


def test_a_driver_that_fails_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver rejects is a problem, and the rest is examined all the same."""

    def reject() -> None:
        raise mlagen.DriverError("cuDeviceGetCount: unknown error", symbol="cuDeviceGetCount")

    monkeypatch.setattr(device, "driver_version", lambda: "13.0")
    monkeypatch.setattr(device, "visible_devices", reject)

    found = document(run)

    assert found["problems"] == ["cuDeviceGetCount: unknown error"]
    assert found["nvrtc"]["version"] == find_nvrtc().version


def test_a_cache_that_cannot_be_written_is_told(run: Run, cache_dir: Path) -> None:
    """A file where the folder should be is a problem."""
    cache_dir.write_text("")

    result = run("doctor")

    assert result.exit_code == 1
    assert f"cache: expected a writable folder, got none: {cache_dir}" in result.stdout


def test_a_cache_that_others_may_write_in_is_told(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """Calls do not use it, so the examination may not call it sound."""
    cache_dir.chmod(0o777)

    result = run("doctor")

    assert cached.units
    assert result.exit_code == 1
    assert "cache: expected a folder that no other user can change, got mode 0777" in result.stdout


@pytest.mark.usefixtures("no_gpu")
def test_layers_are_counted(
    run: Run, cached: PrewarmReport, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its kernels, apart from those of the cache."""
    folder = move_to_layer(cache_dir, monkeypatch)

    found = document(run)

    (layer,) = found["layers"]
    assert (layer["path"], layer["exists"]) == (str(folder), True)
    assert (layer["entries"], found["cache"]["entries"]) == (len(cached.units), 0)
    assert found["problems"] == []


def test_a_layer_that_is_not_there_is_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call passes it by in silence: there is nothing in it."""
    monkeypatch.setenv("MLAGEN_CACHE_RO", str(tmp_path / "nowhere"))
    current_settings.cache_clear()

    result = run("doctor")

    assert result.exit_code == 1
    assert f"layer: expected a cache folder, got none: {tmp_path / 'nowhere'}" in result.stdout
