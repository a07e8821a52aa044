"""nvdisasm: found where it is installed, and asked for by name where it is not."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest

from cache_tools.disassembly import find_nvdisasm, sass_of
from mlagen.errors import ToolchainError


def make_tool(path: Path, script: str) -> Path:
    """Make a program that stands for nvdisasm."""
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no place have nvdisasm."""
    if Path("/usr/local/cuda/bin/nvdisasm").exists():
        pytest.skip("this machine has a CUDA toolkit where every process finds it")

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("nowhere")
def test_without_it_the_message_says_what_to_install() -> None:
    """The extra of mlagen that brings it is named."""
    with pytest.raises(ToolchainError) as caught:
        find_nvdisasm()

    assert str(caught.value) == "nvdisasm: not found; run: pip install 'mlagen[inspect]'"


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("name", ["CUDA_PATH", "CUDA_HOME"])
def test_a_toolkit_that_the_environment_names_has_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be executed is passed by."""
    tool = make_tool(tmp_path / "cuda" / "bin" / "nvdisasm", "exit 0")
    monkeypatch.setenv(name, str(tmp_path / "cuda"))

    found = find_nvdisasm()
    tool.chmod(0o644)

    assert found == tool
    with pytest.raises(ToolchainError):
        find_nvdisasm()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'nvdisasm fatal : no such arch' >&2; exit 1", "nvdisasm fatal : no such arch"),
        ("exit 3", "exit status 3"),
    ],
    ids=["with a reason", "without one"],
)
def test_what_it_refuses_is_an_error(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the first line of its own, and the file."""
    tool = make_tool(tmp_path / "bin" / "nvdisasm", script)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
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
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")

    with pytest.raises(ToolchainError, match=r"^nvdisasm: cannot be run, .*: ") as caught:
        sass_of(tmp_path / "kernel.cubin")

    assert str(caught.value).endswith(str(tool))
