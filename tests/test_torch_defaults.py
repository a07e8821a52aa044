"""The caller's defaults of torch, which loaders of models set, do not change a call."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

import mlagen
from tests.cache.builds import ROOT
from tests.fixture_types import Patch
from tests.odd_calls import ENTRY_CALLS
from tests.problems.entry_points import ENTRY_POINTS
from tests.programs import run_program

FACTORIES = {factory.__name__ for factory in _device_constructors()} | {"Tensor"}
DEFAULTS = [torch.bfloat16, torch.float16, torch.float64, "meta", "cuda", "autocast"]
MAKES_TENSORS = {"paged_flare", "masks"}  # their calls, not only their arguments


def factories_of(file: Path) -> Iterator[str]:
    """Yield the calls in a file that make a tensor of a default dtype or on a default device."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from (f"import {name.name}" for name in node.names if name.name in FACTORIES)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_factory = ast.unparse(node.func.value) == "torch" and node.func.attr in FACTORIES
            if is_factory and not {"dtype", "device"} <= {word.arg for word in node.keywords}:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_tensors_are_made_with_a_dtype_and_on_a_device() -> None:
    """Every call of a factory of torch names both."""
    files = sorted((ROOT / "mlagen").rglob("*.py"))
    found = {str(file.relative_to(ROOT)): [*factories_of(file)] for file in files}

    assert len(found) > 100
    assert {file: calls for file, calls in found.items() if calls} == {}


@cache
def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return calls of every entry point, with formats that the CPU backend decodes by itself."""
    found = {name: build() for name, build in ENTRY_CALLS.items() if name not in MAKES_TENSORS}
    for entry in ENTRY_POINTS.values():
        formats = ("e4m3", "int8", "nvfp4") if entry.name == "xqa_batch" else ()
        for facts in ({}, *({"kv": kv} for kv in formats)):
            given = entry.arguments(entry.build("cpu", seq_lens=(70, 3), **facts))
            found[f"{entry.name} {facts}"] = (entry.function, given)
    v, s = torch.rand(2, 3, 4, 64), torch.rand(2, 3, 4)
    found["merge_states"] = (mlagen.cascade.merge_states, {"v": v, "s": s})
    return found


def results_of(call: tuple[Callable[..., Any], dict[str, Any]]) -> list[torch.Tensor]:
    """Return copies of what a call returns, or writes."""
    function, given = call
    result = function(**given)
    written = given.get("output") if result is None else result
    parts = written if isinstance(written, tuple) else (written,)
    return [part.clone() for part in parts if isinstance(part, torch.Tensor)]


@contextmanager
def default(given: torch.dtype | str) -> Iterator[None]:
    """Set a default of torch."""
    before = torch.get_default_dtype()
    if isinstance(given, torch.dtype):
        torch.set_default_dtype(given)
    elif given != "autocast":
        torch.set_default_device(given)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=given == "autocast"):
            yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


@pytest.mark.parametrize("checks", ["0", "1"])
@pytest.mark.parametrize("given", DEFAULTS, ids=str)
def test_calls_have_the_same_bits(
    given: torch.dtype | str, checks: str, monkeypatch: Patch
) -> None:
    """With any default dtype or device, autocast, checks of contents or none; and the dtypes."""
    monkeypatch.setenv("MLAGEN_CHECK", checks)
    for name, call in calls().items():
        expected = results_of(call)
        with default(given):
            found = results_of(call)
        assert [part.dtype for part in found] == [part.dtype for part in expected], name
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name


# Sets defaults, imports mlagen, and restores them for the making of a problem.
IMPORT = """
import torch
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
import mlagen
assert mlagen.mla and mlagen.decode and mlagen.xqa and mlagen.cascade and mlagen.ops
assert mlagen.writers
torch.set_default_dtype(torch.float32)
torch.set_default_device(None)
from tests.problems.entry_points import ENTRY_POINTS
for name, facts in (("xqa_batch", {"kv": "nvfp4"}), ("trtllm", {})):
    problem = ENTRY_POINTS[name].build("cpu", seq_lens=(70, 3), **facts)
    problem.check(ENTRY_POINTS[name].run(problem))
"""


def test_an_import_keeps_no_default() -> None:
    """Constants of modules have a dtype and a device of their own."""
    command = [sys.executable, "-c", IMPORT]
    done = run_program(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stderr) == (0, "")
