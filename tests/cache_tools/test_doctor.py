"""`mlagen doctor`: diagnosis of the machine."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import mlagen
from cache_tools.commands import doctor
from mlagen.compiler import toolchain
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.runtime import device
from mlagen.runtime.device import DeviceFacts
from tests.fixture_types import Patch

from .altered import move_to_layer
from .conftest import Cached, Setting, raising, run


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: Patch) -> None:
    """Make the driver absent."""
    monkeypatch.setattr(device, "visible_devices", list)
    monkeypatch.setattr(device, "driver_version", lambda: None)


def test_versions_and_paths_are_reported(cache_dir: Path) -> None:
    """Packages, NVRTC's file and the folders are named; a missing GPU is no problem."""
    found = run.json("doctor")

    assert found["mlagen"] == mlagen.__version__
    for name in ("torch", "filelock"):
        assert found["packages"][name] == metadata.version(name)
    assert found["nvrtc"]["version"] == find_nvrtc().version
    assert Path(found["nvrtc"]["path"]).is_file()
    assert (found["driver"], found["gpus"], found["problems"]) == (None, [], [])
    assert found["locks"]["timeout_s"] == 300.0
    nothing = dict.fromkeys(("entries", "damaged", "size_bytes"), 0)
    assert found["cache"] == {"path": str(cache_dir), "exists": False, "writable": True, **nothing}


def test_callers_and_variables_are_reported(setting: Setting, monkeypatch: Patch) -> None:
    """Only the name of a variable that mlagen does not read is shown: it may be a secret."""
    versions = {"vllm": "0.33.0", "flashinfer-python": "0.7.4"}
    found_version = doctor._version_of
    monkeypatch.setattr(
        doctor,
        "_version_of",
        lambda name: versions.get(name) if name in doctor._CALLERS else found_version(name),
    )
    setting("MLAGEN_JIT", "warn")
    setting("MLAGEN_HF", "")
    setting("MLAGEN_HUB_TOKEN", "secret")
    setting("MLAGEN_A\nB", "secret")
    setting("MLAGEN_ACCEPT", "1")
    setting("MLAGEN_PORT_80_TCP_ADDR", "10.0.0.1")

    found, text = run.json("doctor"), run("doctor")

    assert found["callers"] == {"sglang": None, "transformers": None, **versions}
    assert found["variables"] == {
        "MLAGEN_A\nB": None,
        "MLAGEN_CACHE_DIR": os.environ["MLAGEN_CACHE_DIR"],
        "MLAGEN_HF": "",
        "MLAGEN_HUB_TOKEN": None,
        "MLAGEN_JIT": "warn",
        "MLAGEN_LOCK_DIR": os.environ["MLAGEN_LOCK_DIR"],
    }
    lines = [" ".join(line.split()) for line in text.stdout.splitlines()]
    assert "callers vllm 0.33.0, flashinfer-python 0.7.4" in lines
    assert "variables MLAGEN_A\\nB (not read)" in lines
    assert {"MLAGEN_HUB_TOKEN (not read)", "MLAGEN_JIT=warn"} <= set(lines)
    assert "secret" not in text.stdout + text.stderr


@pytest.mark.parametrize("is_layer", [False, True], ids=["the cache", "a layer"])
def test_a_cache_is_measured(is_layer: bool, cached: Cached, monkeypatch: Patch) -> None:
    """Each layer has its own count of kernels and of damaged ones."""
    cached.paths[0].write_text("{")
    root = move_to_layer(cached.root, monkeypatch) if is_layer else cached.root
    found = run.json("doctor")
    measured = found["layers"][0] if is_layer else found["cache"]
    assert (measured["path"], measured["exists"], measured["entries"]) == (str(root), True, 2)
    assert is_layer or (measured["damaged"], measured["size_bytes"] > 10_000) == (1, True)
    assert found["cache"]["entries"] == (0 if is_layer else 2)
    assert found["problems"] == []


def test_a_toolchain_that_is_not_installed_is_named(setting: Setting) -> None:
    """It is no problem, as its cached kernels are used."""
    setting("MLAGEN_TOOLCHAIN", "nvrtc-12.8.93")
    result = run("doctor")
    assert result.exit_code == 0
    end = "; no NVRTC for MLAGEN_TOOLCHAIN=nvrtc-12.8.93, so missing kernels are not compiled\n"
    assert result.stdout.endswith(end)


FACTS = {"sm_count": 132, "memory_bytes": 150_121_000_000}
GPUS = [
    DeviceFacts(index=0, name="NVIDIA H200", major=9, minor=0, **FACTS),
    DeviceFacts(index=1, name="Tesla T4", major=7, minor=5, **FACTS),
]
NO_NVRTC = raising(mlagen.ToolchainError("NVRTC: not found"))
NO_DRIVER = raising(mlagen.DriverError("no", symbol=""))
# What is patched: a name of a module and its value, or a setting; and the problem.
PROBLEMS: dict[str, tuple[tuple[Any, ...], str]] = {
    "no NVRTC": ((toolchain, "find_nvrtc", NO_NVRTC), "NVRTC: not found"),
    "no package": (
        (doctor, "_REQUIRED", ("click", "no-such-package")),
        "no-such-package: not installed; run: pip install no-such-package",
    ),
    "a failing driver": ((device, "visible_devices", NO_DRIVER), "no"),
    "a GPU without a target": (
        (device, "visible_devices", lambda: GPUS),
        "Tesla T4: device: expected compute capability ",
    ),
    "a file for a cache": (
        ("MLAGEN_CACHE_DIR", __file__),
        "cache: expected a writable folder, got none: ",
    ),
    "a cache of others": (
        ("MLAGEN_CACHE_DIR", "open"),
        "cache: expected a trusted folder, got mode 0777",
    ),
    "no layer": (("MLAGEN_CACHE_RO", "nowhere"), "layer: expected a cache folder, got none: "),
}


@pytest.mark.parametrize(("cause", "problem"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_problem_is_reported_with_the_fix(
    cause: Any, problem: str, setting: Setting, monkeypatch: Patch, tmp_path: Path
) -> None:
    """The exit code is 1; text, document and stderr have it, and the other checks go on."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setattr(device, "driver_version", lambda: "13.0")
    if len(cause) == 2:
        setting(*cause)
    else:
        monkeypatch.setattr(*cause)

    found = run.json("doctor", code=1)

    (reported,), text = found["problems"], run("doctor").stdout
    assert reported.startswith(problem)
    assert (found["nvrtc"]["version"] is None) == problem.startswith("NVRTC")
    assert problem in text
    assert run("doctor --json").stderr == f"problem: {reported}\n"
    if problem.startswith("Tesla"):
        assert "supports CUDA 13.0" in text
        assert "NVIDIA H200, sm_90a, 132 SMs, 139.8 GiB" in text
        assert "Tesla T4, not supported, 132 SMs, 139.8 GiB" in text
