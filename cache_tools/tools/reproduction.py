"""Standalone program that recompiles a cached kernel and compares the cubin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlagen.cache.file import CUBIN, HEAD_BYTES
from mlagen.cache.key import CacheKey

from .differences import kernel_of

if TYPE_CHECKING:
    from pathlib import Path

    from mlagen.cache.file import Manifest

_PROGRAM = '''\
"""Compile a kernel as mlagen did, and compare the cubin with the cached one."""

import hashlib
import json
import re
import sys
import zlib
from pathlib import Path

from cuda.bindings import nvrtc

KERNEL = {kernel!r}
ENTRY = Path({entry!r})
NAME = {name!r}
OPTIONS = {options}
TOOLCHAIN = {toolchain!r}
SHA256 = {sha256!r}


def checked(result):
    status, *values = result
    if int(status) != 0:
        sys.exit(f"NVRTC: {{status.name}}")
    return values[0] if values else None


try:
    loaded = "%d.%d" % nvrtc.nvrtcVersion()[1:]
except RuntimeError:  # of cuda.pathfinder
    sys.exit("NVRTC: expected its library, got none; run: pip install nvidia-cuda-nvrtc")
entry = ENTRY.read_bytes()  # head, manifest, cubin, compressed files with the source first
start = {head_bytes} + int.from_bytes(entry[8:12], "little")
files = json.loads(entry[{head_bytes}:start])["files"]
others = zlib.decompress(entry[start + files["kernel.cubin"]["size"] :])
source = others[: files["kernel.cu"]["size"]]
program = checked(nvrtc.nvrtcCreateProgram(source, NAME.encode(), 0, None, None))
options = [option.encode() for option in OPTIONS]
(status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
if int(status) != 0:
    log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    sys.exit(log.decode(errors="replace"))
code = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
checked(nvrtc.nvrtcGetCUBIN(program, code))

release = re.search(rb"Cuda compilation tools, release [0-9.]+, V([0-9.]+)", code)
version = release[1].decode() if release else loaded
compiler = f"nvrtc-{{version}}"
digest = hashlib.sha256(code).hexdigest()
print(f"{{KERNEL}} by {{compiler}}: sha256 {{digest}}")
if digest != SHA256:
    sys.exit(f"expected sha256 {{SHA256}}, built by {{TOOLCHAIN}}")
'''


def program_of(manifest: Manifest, path: Path) -> str:
    """Return the text of the program; it needs cuda-bindings and NVRTC, not mlagen."""
    from mlagen.compiler.nvrtc import PROGRAM_NAME

    options = [
        f"--{label.removeprefix('option.')}{'=' if value else ''}{value}"
        for label, value in manifest.key_fields
        if label.startswith("option.")
    ]
    lines = "".join(f"    {option!r},\n" for option in options)
    return _PROGRAM.format(
        kernel=kernel_of(CacheKey(manifest.key_fields, manifest.toolchain)),
        entry=str(path),
        head_bytes=HEAD_BYTES,
        name=PROGRAM_NAME,
        options=f"[\n{lines}]",
        toolchain=manifest.toolchain,
        sha256=manifest.files[CUBIN].sha256,
    )
