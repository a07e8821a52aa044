"""Files that take long to build: once in a run, whose tests and workers share them."""

from __future__ import annotations

import fcntl
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

from mlagen.artifacts import Cubin, Source
from mlagen.codegen.render import render
from mlagen.compiler.nvrtc import compile_source
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.spec.arch import Arch
from mlagen.spec.kernel import KernelSpec

_folders: list[Path] = []


def share_in(folder: Path) -> None:
    """Keep what is built in ``folder``."""
    folder.mkdir(exist_ok=True)
    _folders[:] = [folder]


def built_once(name: str, build: Callable[[Path], object]) -> Path:
    """Return the file of this name, which ``build`` writes unless another test or worker has."""
    file = _folders[0] / name
    with file.with_name(f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        if not file.exists():
            draft = file.with_name(f"draft-{name}")
            build(draft)
            draft.rename(file)
    return file


def digest(text: str) -> str:
    """Return what distinguishes files that are built of different texts."""
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def cubin_of(spec: KernelSpec) -> Cubin:
    """Return the compiled kernel."""
    return compiled(render(spec), spec.arch)


def compiled(source: Source, arch: Arch) -> Cubin:
    """Return the cubin of a source."""

    def build(file: Path) -> None:
        file.write_bytes(pickle.dumps(compile_source(source, arch, find_nvrtc())))

    lines = ".lines" if source.line_info else ""
    name = f"{digest(source.text)}.{arch}.{find_nvrtc().version}{lines}.cubin"
    cubin = pickle.loads(built_once(name, build).read_bytes())  # noqa: S301 - of this run
    assert isinstance(cubin, Cubin)
    return cubin
