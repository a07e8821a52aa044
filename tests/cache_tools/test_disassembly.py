"""nvdisasm: found where it is installed, an error with its package otherwise."""

from __future__ import annotations

from pathlib import Path

import cuda.pathfinder
import pytest

from cache_tools.tools.disassembly import find_nvdisasm, sass_of
from mlagen.errors import ToolchainError


def make_tool(path: Path, script: str) -> Path:
    """Write a fake nvdisasm."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def find(monkeypatch: pytest.MonkeyPatch, found: Path | None) -> None:
    """Make cuda.pathfinder return this program, or none."""
    path = None if found is None else str(found)
    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_binary_utility", {"nvdisasm": path}.get)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide every installed nvdisasm."""
    find(monkeypatch, None)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("nowhere")
def test_without_it_the_message_names_the_package() -> None:
    """The message names the extra of mlagen that installs it."""
    with pytest.raises(ToolchainError) as caught:
        find_nvdisasm()

    assert str(caught.value) == "nvdisasm: not found; run: pip install nvidia-cuda-nvdisasm"


@pytest.mark.usefixtures("nowhere")
def test_the_path_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda.pathfinder's result takes precedence over the PATH."""
    on_path = make_tool(tmp_path / "nvdisasm", "exit 0")

    assert find_nvdisasm() == on_path

    other = make_tool(tmp_path / "other" / "nvdisasm", "exit 0")
    find(monkeypatch, other)
    assert find_nvdisasm() == other


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'nvdisasm fatal : no such arch' >&2; exit 1", "nvdisasm fatal : no such arch"),
        ("exit 3", "exit status 3"),
    ],
    ids=["with a reason", "without one"],
)
def test_a_rejected_cubin_is_an_error(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the first line of nvdisasm's, and the name of the kernel."""
    tool = make_tool(tmp_path / "bin" / "nvdisasm", script)
    find(monkeypatch, tool)

    with pytest.raises(ToolchainError) as caught:
        sass_of(b"", "combine")

    assert str(caught.value) == f"nvdisasm: {message}: combine"


def test_a_program_that_does_not_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A binary of another machine is an error without a traceback."""
    tool = make_tool(tmp_path / "bin" / "nvdisasm", "")
    tool.write_bytes(b"\x7fELF of another machine")
    find(monkeypatch, tool)

    with pytest.raises(ToolchainError, match=r"^nvdisasm: cannot be run, .*: ") as caught:
        sass_of(b"", "combine")

    assert str(caught.value).endswith(str(tool))
