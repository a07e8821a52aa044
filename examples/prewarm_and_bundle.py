"""Compile kernels ahead of time, and move them to a cache that never compiles.

Shows the build machine, which prewarms the kernels of one call into a bundle, and the serving
machine, which imports the bundle, checks that nothing is missing, and runs first_call.py with
MLAGEN_JIT=error. Both are temporary folders here. No GPU is needed to compile; without one,
first_call.py runs on CPU tensors, which take no kernel.

Run it:     python3 examples/prewarm_and_bundle.py
Prints:     each command, and what it prints.
Exits with: 1 if a command fails, as with a kernel that is missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

# The command `mlagen`; a checkout that is not installed has it as cache_tools.
MLAGEN = ["-m", "mlagen.cache_tools" if find_spec("mlagen.cache_tools") else "cache_tools"]
FIRST_CALL = Path(__file__).with_name("first_call.py")
KERNELS = [
    *("--arch", "native" if torch.cuda.is_available() else "sm_80"),
    *("--family", "mla_sm80,mla_sm90,combine", "--dtype", "bf16", "--kv-dtype", "bf16"),
    *("--kv-lora-rank", "512", "--qk-rope-head-dim", "64", "--page-size", "64", "--heads", "16"),
]


def run(cache: Path, *arguments: str, **settings: str) -> None:
    """Run a Python program on a cache; exit if it fails."""
    shown = ["mlagen", *arguments[2:]] if arguments[0] == "-m" else ["python3", *arguments]
    print(f"\n{cache.name}$", *(f"{name}={value}" for name, value in settings.items()), *shown)
    sys.stdout.flush()
    environment = {**os.environ, "MLAGEN_CACHE_DIR": str(cache), **settings}
    done = subprocess.run([sys.executable, *arguments], env=environment, check=False)
    if done.returncode:
        sys.exit(1)


with tempfile.TemporaryDirectory() as folder:
    build, serve, bundle = (Path(folder, name) for name in ("build", "serve", "kernels.tar.gz"))

    run(build, *MLAGEN, "prewarm", *KERNELS, "--bundle", str(bundle))
    run(serve, *MLAGEN, "cache", "import", str(bundle))
    run(serve, *MLAGEN, "cache", "verify")
    run(serve, *MLAGEN, "prewarm", *KERNELS, "--dry-run")
    run(serve, str(FIRST_CALL), MLAGEN_JIT="error")
