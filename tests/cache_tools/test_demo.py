"""`mlagen demo`: all of its steps, with and without a GPU; its text is in `snapshots.txt`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_tools.benchmark import calls, inputs
from cache_tools.benchmark.selection import case_of
from cache_tools.commands import demo
from cache_tools.commands.demo import result_of
from mlagen import engine
from mlagen.cache.store import kernel_store
from mlagen.errors import ToolchainError
from tests.fixture_types import Patch

from .conftest import raising, run

pytestmark = pytest.mark.usefixtures("compiled_once")
RIGHT = {"error": 0.001, "error_bound": 0.006, "is_right": True}
TIMES = {"first_ms": 700.0, "second_ms": 0.1, "steady_ms": 0.02}
ANSWER: dict[str, Any] = {"gpu": "NVIDIA H200", **TIMES, "result": RIGHT}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: Patch) -> None:
    """Hide the GPUs of this machine from torch, and compile for one more target."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo, "CROSS_ARCHS", ("sm_80",))


def test_without_a_gpu_kernels_are_compiled_found_and_the_cpu_is_right(monkeypatch: Patch) -> None:
    """The kernels of two targets are cached, and the CPU backend agrees with fp32."""
    monkeypatch.setattr(demo, "CROSS_ARCHS", ("sm_90a", "sm_80"))

    result = run("demo --json")

    document = json.loads(result.stdout)
    kernels, found = document["kernels"], document["result"]
    assert (result.exit_code, document["gpu"], found["is_right"]) == (0, None, True)
    assert 0 < found["error"] <= found["error_bound"]
    assert [time["note"] for time in document["times"]] == [
        "5 kernels; 0 in the cache before",
        "slow, with the same checks and results",
    ]
    assert [f"{kernel['family']} {kernel['spec']['arch']}" for kernel in kernels] == [
        *("mla_sm80 sm_90a", "mla_sm90 sm_90a", "combine sm_90a"),
        *("mla_sm80 sm_80", "combine sm_80"),
    ]
    assert {kernel["spec"].get("block_m", "16") for kernel in kernels} == {"16"}
    assert all(Path(kernel["path"]).is_file() for kernel in kernels)
    assert len(list(kernel_store().entries())) == 5


def test_a_wrong_result_is_reported(monkeypatch: Patch) -> None:
    """An error beyond rounding exits with 1, and NaN, as of an invalid slot, is never right."""
    given = inputs.make_inputs(case_of("mla", batch=6, heads=16), 1, "cpu")
    out = torch.zeros(6, 1, 16, 512)
    monkeypatch.setattr(calls, "mlagen_call", lambda _: lambda _: out)
    result = run("demo")
    assert result.exit_code == 1
    assert "WRONG, " in result.stdout
    assert result_of(given, out * torch.nan)["is_right"] is False


def test_with_a_gpu_two_processes_share_a_cache(monkeypatch: Patch) -> None:
    """First calls are timed in new processes, in a temporary cache."""
    folders: list[str] = []

    def in_new_process(folder: str) -> dict[str, Any]:
        folders.append(folder)
        return ANSWER if len(folders) == 1 else {**ANSWER, "first_ms": 17.0}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(demo, "_in_new_process", in_new_process)
    prewarm = demo._prewarm
    monkeypatch.setattr(demo, "_prewarm", lambda _, kept: prewarm("sm_90a", kept))

    document = json.loads(run("demo --json").stdout)

    assert folders == [folders[0]] * 2
    assert not Path(folders[0]).exists()
    assert {time["name"]: time["ms"] for time in document["times"]} == {
        "first call, empty cache": 700.0,
        "second call": 0.1,
        "one of many calls": 0.02,
        "first call of a new process": 17.0,
    }


def test_a_stage_that_fails_ends_the_demo(monkeypatch: Patch) -> None:
    """The demo exits with the code of the failed process, whose message is on stderr."""
    ended = subprocess.CompletedProcess[bytes]([], returncode=3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    result = run("demo")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "", "first process ...\n")


@pytest.mark.parametrize(
    ("place", "error", "code", "last", "kept"),
    [
        ((engine, "build_spec"), ToolchainError("arch: no"), 3, "arch: no", 0),
        ((inputs, "make_inputs"), KeyboardInterrupt(), 130, "interrupted, 2 kernels kept", 2),
    ],
    ids=["a failure", "an interrupt"],
)
def test_what_ends_the_demo_is_the_last_line(
    place: Any, error: Any, code: int, last: str, kept: int, monkeypatch: Any
) -> None:
    """The message is that of NVRTC, and compiled kernels stay in the cache."""
    monkeypatch.setattr(*place, raising(error))
    result = run("demo")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (code, f"mlagen: {last}")
    assert len(list(kernel_store().entries())) == kept
