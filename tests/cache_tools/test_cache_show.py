"""`mlagen cache show`: one kernel, its parts, its SASS, and the program that compiles it again."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cuda.pathfinder
import pytest

from cache_tools.tools.disassembly import find_nvdisasm, sass_of
from cache_tools.tools.entries import entries_of
from mlagen.cache.default_store import kernel_store
from mlagen.errors import ArgumentError, ToolchainError
from tests.fixture_types import Patch

from .altered import recast
from .conftest import Cached, run

PARTS = {"source": "kernel.cu", "log": "build.log", "manifest": "manifest.json"}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_printed_byte_for_byte(part: str, cached: Cached) -> None:
    """It can be redirected to a file, and has its own name in the document."""
    command = ("cache", "show", cached.keys[0], f"--{part}")
    text, document = run(*command), run(*command, "--json")
    content = (cached.folders[0] / PARTS[part]).read_text(encoding="utf-8")
    assert (text.exit_code, text.stdout) == (0, content)
    assert json.loads(document.stdout)["entries"][0][part]


def test_every_compiler_is_shown_or_the_one_that_is_named(cached: Cached) -> None:
    """KEY/TOOLCHAIN is one entry, KEY is all of them."""
    recast(cached.folders[0], toolchain="nvrtc-12.8.1", keeps=True)
    every = run.json("cache show", cached.keys[0])["entries"]
    named = run.json("cache show", f"{cached.keys[0]}/nvrtc-12.8.1")["entries"]
    assert [entry["toolchain"] for entry in every] == ["nvrtc-12.8.1", cached.units[0].toolchain]
    assert named == every[:1]


def test_a_prefix_of_six_digits_or_more_is_a_key(cached: Cached, monkeypatch: Patch) -> None:
    """It may be in upper case; the message on an ambiguous one has digits that distinguish."""
    store = kernel_store()
    everything = list(store.entries())
    keys = ", ".join(sorted(key[:10] for key in cached.keys))
    messages = {
        "abc": "key: expected 6 to 64 lower-case hex digits, got 'abc'",
        "kernel": "key: expected 6 to 64 lower-case hex digits, got 'kernel'",
        "abcdef": f"key: expected more digits than abcdef, got several keys: {keys}",
    }

    for digits in (6, 8, 64):
        (found,) = entries_of(store, cached.keys[0][:digits].upper())
        assert found.key == cached.keys[0]
    for prefix, message in messages.items():
        if prefix == "abcdef":
            monkeypatch.setattr(store, "select", lambda _prefix: everything)
        with pytest.raises(ArgumentError, match=f"^{message}$"):
            entries_of(store, prefix)


@pytest.fixture
def tool(monkeypatch: Patch, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a fake nvdisasm, which cuda.pathfinder finds."""
    found = {"nvdisasm": None}
    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_binary_utility", found.get)
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(content: str | bytes = "exit 0", folder: str = "bin") -> Path:
        path = tmp_path / folder / "nvdisasm"
        path.parent.mkdir(exist_ok=True)
        script = content if isinstance(content, bytes) else f"#!/bin/sh\n{content}\n".encode()
        path.write_bytes(script)
        path.chmod(0o755)
        found["nvdisasm"] = None if folder == "." else str(path)  # type: ignore[assignment]
        return path

    return make


def test_nvdisasm_is_found_or_its_package_is_named(
    cached: Cached, tool: Callable[..., Path]
) -> None:
    """cuda.pathfinder's result takes precedence over the PATH; without both, the code is 3."""
    result = run("cache show", cached.keys[0], "--sass")
    message = "mlagen: nvdisasm: not found; run: pip install nvidia-cuda-nvdisasm\n"
    assert (result.exit_code, result.stdout, result.stderr) == (3, "", message)
    for folder in (".", "bin"):
        path = tool(folder=folder)
        assert find_nvdisasm() == path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("echo 'fatal: no such arch' >&2; exit 1", "nvdisasm: fatal: no such arch: combine"),
        ("exit 3", "nvdisasm: exit status 3: combine"),
        (b"\x7fELF of another machine", "nvdisasm: cannot be run, .*: .*/nvdisasm"),
    ],
    ids=["a reason", "none", "a binary of another machine"],
)
def test_a_rejected_cubin_is_an_error(
    content: str | bytes, message: str, tool: Callable[..., Path]
) -> None:
    """The message has the first line of nvdisasm's, and the name of the kernel."""
    tool(content)
    with pytest.raises(ToolchainError, match=f"^{message}$"):
        sass_of(b"", "combine")


def test_a_program_compiles_it_again_without_mlagen(cached: Cached, tmp_path: Path) -> None:
    """It prints kernel, compiler and digest of the cubin; another cubin is exit code 1."""
    unit, source = cached.units[0], cached.folders[0] / "kernel.cu"
    digest = hashlib.sha256((cached.folders[0] / "kernel.cubin").read_bytes()).hexdigest()
    # NVRTC 12.8 omits its patch level.
    compiler = re.sub(r"^(nvrtc-12\.8)\.\d+$", r"\1", str(unit.toolchain))
    program = run("cache show", cached.keys[0], "--reproduce").stdout
    script = tmp_path / "reproduce.py"
    script.write_text(f"import sys; sys.modules['mlagen'] = None\n{program}")
    wrong = "int f() { return nothing; }\n"
    ran = []
    for text in (source.read_text(), source.read_text().replace("combine(", "combine_2("), wrong):
        source.write_text(text)
        command = [sys.executable, str(script)]
        ran.append(subprocess.run(command, capture_output=True, text=True, check=False))

    same, other, failed = ran
    assert (same.returncode, same.stdout) == (0, f"{unit.spec} by {compiler}: sha256 {digest}\n")
    expected = f"expected sha256 {digest}, built by {unit.toolchain}\n"
    assert (other.returncode, other.stderr) == (1, expected)
    assert failed.returncode == 1
    assert 'kernel.cu(1): error: identifier "nothing" is undefined' in failed.stderr
    assert "Traceback" not in failed.stderr
