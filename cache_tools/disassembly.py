"""SASS of a cubin, by nvdisasm where it is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from mlagen.errors import ToolchainError


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
        message = ran.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise ToolchainError(f"nvdisasm: {message or f'exit status {ran.returncode}'}: {cubin}")
    return ran.stdout.decode(errors="replace")


def find_nvdisasm() -> Path:
    """Return nvdisasm from a wheel, a conda environment, a CUDA toolkit or the PATH.

    Raises
    ------
    ToolchainError
        If there is none; the message names the package to install.
    """
    from cuda.pathfinder import find_nvidia_binary_utility

    # Distributions install it outside of any toolkit, on the PATH.
    found = find_nvidia_binary_utility("nvdisasm") or shutil.which("nvdisasm")
    if found is None:
        raise ToolchainError("nvdisasm: not found; run: pip install 'mlagen[inspect]'")
    return Path(found)
