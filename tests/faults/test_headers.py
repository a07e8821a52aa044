"""Stray headers in folders are not part of a kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlagen.artifacts import Source
from mlagen.compiler.nvrtc import compile_source
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.errors import CompileError
from tests.kernels import SM_80

ROOT = Path(__file__).resolve().parents[2]

PLANTED = ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "cuda_runtime.h", "cuda.h", "mma.h")

# Prints the digest of a cubin; in its own process, since NVRTC reads its environment.
PRINT_DIGEST = """
import hashlib
from mlagen import engine
from tests.kernels import COMBINE
print(hashlib.sha256(engine.find_or_build(COMBINE).entry.cubin).hexdigest())
"""


def plant(folder: Path) -> None:
    """Put headers that fail any compilation into a folder."""
    folder.mkdir()
    for name in PLANTED:
        (folder / name).write_text("#error planted\n#define float double\n")


def digest_of_a_kernel(folder: Path, cache: Path) -> str:
    """Compile a kernel with a folder as the current one, and in the include variables."""
    named = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "INCLUDE", "TMPDIR")
    environ = {
        **os.environ,
        **dict.fromkeys(named, str(folder)),
        "MLAGEN_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    command = [sys.executable, "-c", PRINT_DIGEST]
    return subprocess.run(
        command, cwd=folder, env=environ, check=True, capture_output=True, text=True
    ).stdout


def test_headers_of_the_current_folder_are_not_part_of_a_kernel(tmp_path: Path) -> None:
    """The cubin is the same with and without such headers."""
    plant(tmp_path / "planted")
    (tmp_path / "bare").mkdir()

    digests = {
        digest_of_a_kernel(tmp_path / name, tmp_path / f"cache of {name}")
        for name in ("planted", "bare")
    }

    assert len(digests) == 1
    assert len(digests.pop()) == 65


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_header_is_not_even_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quoted include does not find a header of the current folder."""
    plant(tmp_path / "planted")
    monkeypatch.chdir(tmp_path / "planted")
    text = f'#include "{name}"\nextern "C" __global__ void empty() {{}}\n'
    source = Source(text=text, origins=("empty.cu:1", "empty.cu:2"))

    with pytest.raises(CompileError) as caught:
        compile_source(source, SM_80, find_nvrtc())

    assert "planted" not in caught.value.log
    assert name in caught.value.log
