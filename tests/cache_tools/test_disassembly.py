"""nvdisasm: found where it is installed, and asked for by name where it is not."""

from __future__ import annotations

from pathlib import Path

import cuda.pathfinder
import pytest

from cache_tools.disassembly import find_nvdisasm, sass_of
from mlagen.errors import ToolchainError


def make_tool(path: Path, script: str) -> Path:
    """Make a program that stands for nvdisasm."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def find(monkeypatch: pytest.MonkeyPatch, found: Path | None) -> None:
    """Have cuda.pathfinder find a program, or none."""
    path = None if found is None else str(found)
    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_binary_utility", {"nvdisasm": path}.get)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no place have nvdisasm."""
    find(monkeypatch, None)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("nowhere")
def test_without_it_the_message_says_what_to_install() -> None:
    """The extra of mlagen that brings it is named."""
    with pytest.raises(ToolchainError) as caught:
        find_nvdisasm()

    assert str(caught.value) == "nvdisasm: not found; run: pip install 'mlagen[inspect]'"


@pytest.mark.usefixtures("nowhere")
def test_the_path_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a distribution installs is found, and passed by where cuda.pathfinder finds another."""
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
def test_what_it_rejects_is_an_error(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the first line of its own, and the file."""
    tool = make_tool(tmp_path / "bin" / "nvdisasm", script)
    find(monkeypatch, tool)
    cubin = tmp_path / "kernel.cubin"

    with pytest.raises(ToolchainError) as caught:
        sass_of(cubin)

    assert str(caught.value) == f"nvdisasm: {message}: {cubin}"


def test_a_program_that_does_not_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executable for another machine ends without a traceback."""
    tool = make_tool(tmp_path / "bin" / "nvdisasm", "")
    tool.write_bytes(b"\x7fELF of another machine")
    find(monkeypatch, tool)

    with pytest.raises(ToolchainError, match=r"^nvdisasm: cannot be run, .*: ") as caught:
        sass_of(tmp_path / "kernel.cubin")

    assert str(caught.value).endswith(str(tool))
