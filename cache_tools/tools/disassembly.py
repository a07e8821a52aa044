"""SASS of a cubin, by nvdisasm where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from tempfile import NamedTemporaryFile

from mlagen.errors import ToolchainError

# An offset, a predicate, if any, and the opcode.
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z]\w*)")


def sass_of(cubin: bytes, name: str) -> str:
    """Return the SASS of a cubin; ``name`` stands for it in a message.

    Raises ToolchainError if nvdisasm is not installed, does not run, or does not know the cubin's
    architecture.
    """
    tool = find_nvdisasm()
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Template lines are printed where the cubin has them, by MLAGEN_LINEINFO=1.
        command = [str(tool), "--print-code", "--print-line-info", file.name]
        try:
            ran = subprocess.run(command, capture_output=True, check=False)
        except OSError as error:
            raise ToolchainError(f"nvdisasm: cannot be run, {error.strerror}: {tool}") from error
    if ran.returncode != 0:
        message = ran.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise ToolchainError(f"nvdisasm: {message or f'exit status {ran.returncode}'}: {name}")
    return ran.stdout.decode(errors="replace")


def opcodes_of(sass: str) -> dict[str, int]:
    """Return how often each opcode, without its modifiers, is in SASS; the most frequent first."""
    counts = Counter(_INSTRUCTION.findall(sass))
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def find_nvdisasm() -> Path:
    """Return nvdisasm from a wheel, a conda environment, a CUDA toolkit or the PATH.

    Raises ToolchainError if there is none; the message names the package to install.
    """
    from cuda.pathfinder import find_nvidia_binary_utility

    # Distributions install it outside of any toolkit, on the PATH.
    found = find_nvidia_binary_utility("nvdisasm") or shutil.which("nvdisasm")
    if found is None:
        raise ToolchainError("nvdisasm: not found; run: pip install nvidia-cuda-nvdisasm")
    return Path(found)
