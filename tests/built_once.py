"""Files that take long to build: once for all tests and workers, most for later runs too."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from mlagen.artifacts import Cubin, Source
from mlagen.codegen.render import render
from mlagen.compiler.nvrtc import compile_source
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.spec.arch import Arch
from mlagen.spec.kernel import KernelSpec

ROOT = Path(__file__).resolve().parents[1]
# What `make clean` removes; files that no run has used for so long go before.
KEPT = ROOT / "build/tests"
_DAYS = 14
_folders: list[Path] = []


def share_in(folder: Path) -> None:
    """Keep what is built in ``folder``, and what later runs can use in the checkout's own."""
    folder.mkdir(exist_ok=True)
    try:
        KEPT.mkdir(parents=True, exist_ok=True)
        kept = KEPT if os.access(KEPT, os.W_OK) else folder
    except OSError:
        kept = folder
    _folders[:] = [folder, kept]
    oldest = time.time() - _DAYS * 86_400
    for file in kept.rglob("*.*"):
        with suppress(FileNotFoundError):  # another worker was first
            if file.stat().st_mtime < oldest:
                file.unlink()


def built_once(
    name: str, build: Callable[[Path], object], *, made_of: Iterable[str | bytes] = ()
) -> Path:
    """Return the file of this name, which ``build`` writes unless another test or worker has.

    A file that is a function of texts, ``made_of``, is kept for later runs.
    """
    folder = _folders[0]
    if parts := list(made_of):
        folder = _folders[1] / digest(*parts)
        folder.mkdir(exist_ok=True)
    file = folder / name
    with file.with_name(f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        if file.exists():
            os.utime(file)
        else:
            draft = file.with_name(f"draft-{name}")
            build(draft)
            draft.rename(file)
    return file


def digest(*parts: str | bytes) -> str:
    """Return what distinguishes files that are built of different texts."""
    texts = [part.encode() if isinstance(part, str) else part for part in parts]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:20]


def cubin_of(spec: KernelSpec) -> Cubin:
    """Return the compiled kernel."""
    return compiled(render(spec), spec.arch)


@cache
def compiler_code() -> bytes:
    """Return the code that makes and holds a cubin."""
    files = [ROOT / "mlagen/artifacts.py", *sorted((ROOT / "mlagen/compiler").glob("*.py"))]
    return b"".join(file.read_bytes() for file in files)


def compiled(source: Source, arch: Arch) -> Cubin:
    """Return the cubin of a source."""

    def build(file: Path) -> None:
        file.write_bytes(pickle.dumps(compile_source(source, arch, find_nvrtc())))

    lines = "with line info" if source.line_info else ""
    made_of = (source.text, str(arch), str(find_nvrtc()), lines, compiler_code())
    kept = built_once("kernel.cubin", build, made_of=made_of)
    cubin = pickle.loads(kept.read_bytes())  # noqa: S301 - of this checkout
    assert isinstance(cubin, Cubin)
    return cubin
