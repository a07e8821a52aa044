"""Machine code as text, through nvdisasm where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from mlagen.errors import ToolchainError

# The wheels that hold it; `mlagen[inspect]` asks for the first.
_WHEELS = ("nvidia-cuda-nvdisasm", "nvidia-cuda-nvdisasm-cu12")


def sass_of(cubin: Path) -> str:
    """Return the SASS of a cubin.

    Raises
    ------
    ToolchainError
        If nvdisasm is not installed, does not run, or does not know the cubin's architecture.
    """
    tool = find_nvdisasm()
    try:
        ran = subprocess.run([tool, "--print-code", cubin], capture_output=True, check=False)
    except OSError as error:
        raise ToolchainError(f"nvdisasm: cannot be run, {error.strerror}: {tool}") from error
    if ran.returncode != 0:
        said = ran.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise ToolchainError(f"nvdisasm: {said or f'exit status {ran.returncode}'}: {cubin}")
    return ran.stdout.decode(errors="replace")


def find_nvdisasm() -> Path:
    """Return nvdisasm from the PATH, a wheel of this environment, or an installed CUDA toolkit.

    Raises
    ------
    ToolchainError
        If there is none; the message says what to install.
    """
    if found := shutil.which("nvdisasm"):
        return Path(found)
    for name in _WHEELS:
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            path = Path(str(file.locate()))
            if file.name == "nvdisasm" and os.access(path, os.X_OK):
                return path
    homes = [os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME")]
    for home in (*homes, "/usr/local/cuda"):
        path = Path(home or "relative") / "bin" / "nvdisasm"
        if path.is_absolute() and os.access(path, os.X_OK):
            return path
    raise ToolchainError("nvdisasm: not found; run: pip install 'mlagen[inspect]'")
