"""A pytest plugin: the shim in front of FlashInfer, and a line of JSON for each test."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Generator, Iterable
from hashlib import blake2b
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

shim: Any = importlib.import_module("flashinfer_shim")
shim.install()

# What a full GPU makes of an allocation, of the first call of a process, and of cuBLAS.
_NO_MEMORY = re.compile("out.of.memory|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)", re.IGNORECASE)
_MAX_REASON = 600

torch.cuda.get_device_capability = lambda *_: shim.CAPABILITY  # mlagen does not read it

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
    except RuntimeError as error:
        # assert_close wraps an error of its comparison.
        if not _NO_MEMORY.search(f"{error} {error.__cause__}"):
            raise
        pytest.skip("out of memory")


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of this process, and report each as not run yet."""
    choice = json.loads(os.environ["MLAGEN_SHIM_CHOICE"])
    if choice["tests"] is not None:
        wanted = set(choice["tests"])
        items[:] = [item for item in items if Path(item.nodeid).name in wanted]
    if choice["pairs"] or choice["limit"]:
        items[:] = sample_of(items, choice["limit"], pairs_only=choice["pairs"])
    (shard, shards), (piece, pieces) = choice["shard"], choice["piece"]
    numbers = ((item, _number_of(item)) for item in items)
    items[:] = [
        item
        for item, number in numbers
        if number % shards == shard - 1 and number // shards % pieces == piece
    ]
    kind = "collected" if config.option.collectonly else "not run"
    _report({"id": item.nodeid, "outcome": kind, "reason": ""} for item in items)


def sample_of(items: list[pytest.Item], limit: int, *, pairs_only: bool) -> list[pytest.Item]:
    """Return a sample in which pairs of parameter values of a test come first, in their order.

    Every pair is there if the limit allows it. The rest is chosen by hash, as a stride would hit
    few values of the innermost parameters.
    """
    first: list[pytest.Item] = []
    others: list[pytest.Item] = []
    seen: set[Any] = set()
    for item in sorted(items, key=_number_of):
        call = getattr(item, "callspec", None)
        values = [(key, str(value)) for key, value in call.params.items()] if call else []
        name = item.nodeid.partition("[")[0]
        pairs: set[Any] = {(name, *pair) for pair in combinations(values, 2)}
        pairs.add((name, *values[:1]))  # a test of one parameter, or of none
        (others if pairs <= seen else first).append(item)
        seen |= pairs
    chosen = {item.nodeid for item in (first if pairs_only else (first + others))[: limit or None]}
    return [item for item in items if item.nodeid in chosen]


def _number_of(item: pytest.Item) -> int:
    """Return a number that is evenly distributed, and depends on the id alone."""
    return int.from_bytes(blake2b(Path(item.nodeid).name.encode(), digest_size=8).digest(), "big")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the outcome of a test."""
    is_outcome = report.when == "call" or report.outcome != "passed"
    if not is_outcome or report.when == "teardown":
        return
    _report([{"id": report.nodeid, "outcome": report.outcome, "reason": _reason_of(report)}])
    if report.outcome == "failed" and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:  # every later test of this process would fail
            if not _NO_MEMORY.search(str(error)):
                pytest.exit(f"the CUDA context is lost: {error}", returncode=3)


def _reason_of(report: pytest.TestReport) -> str:
    """Return the reason of a skip, or where a test failed and the first line of the error."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[-1]
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return str(report.longrepr or "")[-_MAX_REASON:]
    message = (crash.message.splitlines() or [""])[0]
    return f"{Path(crash.path).name}:{crash.lineno}: {message}"[:_MAX_REASON]


def _report(entries: Iterable[dict[str, str]]) -> None:
    with Path(os.environ["MLAGEN_SHIM_REPORT"]).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)
