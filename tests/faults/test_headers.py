"""Stray headers in folders are not part of a kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
