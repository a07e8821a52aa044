"""`mlagen doctor`: diagnosis of the machine."""

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
    """Return the JSON document of the command."""
    parsed: dict[str, Any] = json.loads(run("doctor", "--json").stdout)
    return parsed


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the driver absent."""
    monkeypatch.setattr(device, "visible_devices", list)
    monkeypatch.setattr(device, "driver_version", lambda: None)


@pytest.mark.usefixtures("no_gpu")
def test_versions_and_paths_are_reported(run: Run, cache_dir: Path) -> None:
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
def test_a_missing_gpu_is_no_problem(run: Run) -> None:
    """The report has the missing GPU, but no problem."""
    result = run("doctor")

    facts = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert result.exit_code == 0
    assert facts["driver"] == "none"
    assert facts["GPUs"] == "none: kernels compile, and the CPU backend computes"
    assert facts["problems"] == "none; no driver, so calls on GPU tensors fail"


def test_the_cache_is_measured(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """The report has the number of entries, their size, and the damaged ones."""
    unit = cached.units[0]
    cubin = damage(unit.key, unit.toolchain, cache_dir)
    (cubin.parent / "manifest.json").write_text("{")

    cache = document(run)["cache"]

    assert (cache["exists"], cache["entries"], cache["damaged"]) == (True, 2, 1)
    assert cache["size_bytes"] > 10_000


def test_gpus_are_listed_with_their_targets(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without a target is a problem."""
    facts = {"sm_count": 132, "memory_bytes": 150_121_000_000}
    gpus = [
        DeviceFacts(index=0, name="NVIDIA H200", major=9, minor=0, **facts),
        DeviceFacts(index=1, name="Tesla T4", major=7, minor=5, **facts),
    ]
    monkeypatch.setattr(device, "visible_devices", lambda: gpus)
    monkeypatch.setattr(device, "driver_version", lambda: "13.0")

    result = run("doctor")

    assert result.exit_code == 1
    assert "supports CUDA 13.0" in result.stdout
    assert "NVIDIA H200, sm_90a, 132 SMs, 139.8 GiB" in result.stdout
    assert "Tesla T4, not supported, 132 SMs, 139.8 GiB" in result.stdout
    assert "Tesla T4: device: expected compute capability " in result.stdout


def test_a_missing_nvrtc_is_reported_with_the_fix(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The problem is the message of the error, and the exit code is 1."""

    def missing() -> None:
        raise mlagen.ToolchainError("NVRTC: not found; run: pip install nvidia-cuda-nvrtc")

    monkeypatch.setattr(toolchain, "find_nvrtc", missing)

    result = run("doctor")

    assert result.exit_code == 1
    assert "NVRTC: not found; run: pip install nvidia-cuda-nvrtc" in result.stdout


def test_a_missing_package_is_reported_with_the_fix(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each missing package has a line with its install command, on stderr too."""
    monkeypatch.setattr(doctor, "_REQUIRED", ("click", "no-such-package"))

    result = run("doctor", "--json")

    problem = "no-such-package: not installed; run: pip install no-such-package"
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problems"] == [problem]
    assert result.stderr == f"problem: {problem}\n"


def test_a_failing_driver_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the driver is a problem, and the other checks still run."""

    def reject() -> None:
        raise mlagen.DriverError("cuDeviceGetCount: unknown error", symbol="cuDeviceGetCount")

    monkeypatch.setattr(device, "driver_version", lambda: "13.0")
    monkeypatch.setattr(device, "visible_devices", reject)

    found = document(run)

    assert found["problems"] == ["cuDeviceGetCount: unknown error"]
    assert found["nvrtc"]["version"] == find_nvrtc().version


def test_a_read_only_cache_is_reported(run: Run, cache_dir: Path) -> None:
    """A file in place of the folder is a problem."""
    cache_dir.write_text("")

    result = run("doctor")

    assert result.exit_code == 1
    assert f"cache: expected a writable folder, got none: {cache_dir}" in result.stdout


def test_a_cache_that_others_may_write_in_is_reported(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """Calls reject such a cache, so the report does too."""
    cache_dir.chmod(0o777)

    result = run("doctor")

    assert cached.units
    assert result.exit_code == 1
    assert "cache: expected a folder that no other user can change, got mode 0777" in result.stdout


@pytest.mark.usefixtures("no_gpu")
def test_layers_are_counted(
    run: Run, cached: PrewarmReport, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer has its own count of kernels."""
    folder = move_to_layer(cache_dir, monkeypatch)

    found = document(run)

    (layer,) = found["layers"]
    assert (layer["path"], layer["exists"]) == (str(folder), True)
    assert (layer["entries"], found["cache"]["entries"]) == (len(cached.units), 0)
    assert found["problems"] == []


def test_a_missing_layer_is_reported(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls skip a missing layer silently; the report names it."""
    monkeypatch.setenv("MLAGEN_CACHE_RO", str(tmp_path / "nowhere"))
    current_settings.cache_clear()

    result = run("doctor")

    assert result.exit_code == 1
    assert f"layer: expected a cache folder, got none: {tmp_path / 'nowhere'}" in result.stdout
