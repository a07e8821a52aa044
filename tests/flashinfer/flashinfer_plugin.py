"""A pytest plugin: the shim in front of FlashInfer, and a line of JSON for each test."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

importlib.import_module("flashinfer_shim").install()

if not torch.cuda.is_available():
    # Modules read them when they are collected.
    _GPU: Any = SimpleNamespace(multi_processor_count=132, total_memory=80 << 30, major=9, minor=0)
    torch.cuda.get_device_properties = lambda *_: _GPU
    torch.cuda.memory_reserved = lambda *_: 0
    torch.cuda.synchronize = lambda *_: None

    class _CpuGenerator(torch.Generator):  # no mode sees the constructor of torch's
        def __new__(cls, device: Any = None) -> Any:
            del device
            return super().__new__(cls)

    setattr(torch, "Generator", _CpuGenerator)  # noqa: B010 - of any type


class _OnCpu(TorchFunctionMode):
    """CPU tensors where a test asks for CUDA tensors."""

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch with the CPU for a GPU."""
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        moved = tuple(map(_on_cpu, args))
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to and len(args) > 1 and args[1].__class__ is int:
            return args[0]
        return function(*moved, **kwargs)


def _on_cpu(value: Any) -> Any:
    is_device = isinstance(value, torch.device) and value.type == "cuda"
    is_name = isinstance(value, str) and value.startswith("cuda")
    return torch.device("cpu") if is_device or is_name else value


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run a test, on CPU tensors if the runner asks for it; out of memory is no failure."""
    del item
    try:
        if os.environ.get("MLAGEN_SHIM_DEVICE") == "cpu":
            with _OnCpu():
                return (yield)
        return (yield)
    except torch.cuda.OutOfMemoryError:
        pytest.skip("out of memory")


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep an evenly spread sample of the tests, if the runner asks for one."""
    del config
    limit = int(os.environ.get("MLAGEN_SHIM_LIMIT", "0"))
    if limit and len(items) > limit:
        items[:] = items[:: -(-len(items) // limit)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the outcome of a test."""
    is_outcome = report.when == "call" or report.outcome != "passed"
    if not is_outcome or report.when == "teardown":
        return
    reason = report.longrepr
    if isinstance(reason, tuple):
        reason = reason[-1]
    entry = {"id": report.nodeid, "outcome": report.outcome, "reason": str(reason or "")[-600:]}
    with Path(os.environ["MLAGEN_SHIM_REPORT"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
