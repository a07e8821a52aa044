"""`mlagen cache show`: one kernel, its parts, its SASS, and the program that compiles it again."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import cuda.pathfinder
import pytest

from cache_tools.tools.disassembly import find_nvdisasm, sass_of
from mlagen.errors import ToolchainError

from .altered import recast
from .conftest import Cached, Documented, Run

PARTS = {"source": "kernel.cu", "log": "build.log", "manifest": "manifest.json"}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_printed_byte_for_byte(part: str, run: Run, cached: Cached) -> None:
    """It can be redirected to a file, and has its own name in the document."""
    command = ("cache", "show", cached.keys[0], f"--{part}")

    text, document = run(*command), run(*command, "--json")

    content = (cached.folders[0] / PARTS[part]).read_text(encoding="utf-8")
    assert (text.exit_code, text.stdout) == (0, content)
    assert json.loads(document.stdout)["entries"][0][part]


def test_every_compiler_is_shown_or_the_one_that_is_named(
    document: Documented, cached: Cached
) -> None:
    """KEY/TOOLCHAIN is one entry, KEY is all of them."""
    recast(cached.folders[0], toolchain="nvrtc-12.8.1", keeps=True)

    every = document("cache", "show", cached.keys[0])["entries"]
    named = document("cache", "show", f"{cached.keys[0]}/nvrtc-12.8.1")["entries"]

    assert [entry["toolchain"] for entry in every] == ["nvrtc-12.8.1", cached.units[0].toolchain]
    assert named == every[:1]


def require_tool(monkeypatch: pytest.MonkeyPatch, found: Path | None) -> None:
    """Make cuda.pathfinder return this program, or none."""
    path = None if found is None else str(found)
    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_binary_utility", {"nvdisasm": path}.get)


def make_tool(path: Path, content: str | bytes) -> Path:
    """Write a fake nvdisasm."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else f"#!/bin/sh\n{content}\n".encode())
    path.chmod(0o755)
    return path


def test_nvdisasm_is_found_or_its_package_is_named(
    run: Run, cached: Cached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuda.pathfinder's result takes precedence over the PATH; without both, the code is 3."""
    require_tool(monkeypatch, None)
    monkeypatch.setenv("PATH", str(tmp_path))

    result = run("cache", "show", cached.keys[0], "--sass")

    message = "mlagen: nvdisasm: not found; run: pip install nvidia-cuda-nvdisasm\n"
    assert (result.exit_code, result.stdout, result.stderr) == (3, "", message)
    on_path = make_tool(tmp_path / "nvdisasm", "exit 0")
    assert find_nvdisasm() == on_path
    other = make_tool(tmp_path / "other" / "nvdisasm", "exit 0")
    require_tool(monkeypatch, other)
    assert find_nvdisasm() == other


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "echo 'nvdisasm fatal : no such arch' >&2; exit 1",
            "nvdisasm: nvdisasm fatal : no such arch: combine",
        ),
        ("exit 3", "nvdisasm: exit status 3: combine"),
        (b"\x7fELF of another machine", "nvdisasm: cannot be run, .*: .*/nvdisasm"),
    ],
    ids=["a reason", "none", "a binary of another machine"],
)
def test_a_rejected_cubin_is_an_error(
    content: str | bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the first line of nvdisasm's, and the name of the kernel."""
    require_tool(monkeypatch, make_tool(tmp_path / "bin" / "nvdisasm", content))

    with pytest.raises(ToolchainError, match=f"^{message}$"):
        sass_of(b"", "combine")


def ran(script: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in its folder."""
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=script.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_program_compiles_it_again_without_mlagen(
    run: Run, cached: Cached, tmp_path: Path
) -> None:
    """It prints kernel, compiler and digest of the cubin; another cubin is exit code 1."""
    unit, source = cached.units[0], cached.folders[0] / "kernel.cu"
    digest = hashlib.sha256((cached.folders[0] / "kernel.cubin").read_bytes()).hexdigest()
    # NVRTC 12.8 omits its patch level.
    compiler = re.sub(r"^(nvrtc-12\.8)\.\d+$", r"\1", str(unit.toolchain))
    program = run("cache", "show", cached.keys[0], "--reproduce").stdout
    script = tmp_path / "reproduce.py"
    script.write_text(f"import sys; sys.modules['mlagen'] = None\n{program}")
    text = source.read_text()

    same = ran(script)
    source.write_text(text.replace("combine(", "combine_2("))
    other = ran(script)
    source.write_text("int f() { return nothing; }\n")
    failed = ran(script)

    assert (same.returncode, same.stdout) == (0, f"{unit.spec} by {compiler}: sha256 {digest}\n")
    expected = f"expected sha256 {digest}, built by {unit.toolchain}\n"
    assert (other.returncode, other.stderr) == (1, expected)
    assert failed.returncode == 1
    assert 'kernel.cu(1): error: identifier "nothing" is undefined' in failed.stderr
    assert "Traceback" not in failed.stderr
