"""Where NVRTC runs: in this process, or in a fresh one where it could hang or crash in this one.

NVRTC keeps locks that no fork resets: of six children that were forked while another thread
compiled, one hung in its own first compilation. And what it needs to compile goes when a process
ends: of 18 that ended while a daemon thread compiled, five crashed (NVRTC 13.5 on 2 cores).
"""

from __future__ import annotations

import json
import logging
import os
import subprocess  # here, and not when it is needed: such a child had better import nothing
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlagen.artifacts import Cubin, Resources, Source
from mlagen.compiler.toolchain import Nvrtc
from mlagen.errors import CompileError, ToolchainError
from mlagen.fork_safety import in_one_piece, is_ending
from mlagen.spec.arch import Arch

# The path comes first, so that nothing is imported from the current folder by accident.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; from mlagen.compiler.nvrtc_process import main; main()"
)
# What stands before the answer: other code may print when a Python starts.
_MARK = b"\nmlagen.compiler.nvrtc_process\n"

_logger = logging.getLogger("mlagen")

_under_way: set[object] = set()  # compilations of this process
_is_cut = False  # forked in the middle of one, or descended from such a child


def compile_anywhere(source: Source, arch: Arch, nvrtc: Nvrtc) -> Cubin:
    """Compile ``source`` for ``arch``, in this process if that is safe.

    Raises
    ------
    ToolchainError
        If NVRTC cannot be loaded or does not know ``arch``, or a fresh process is needed and none
        can be started.
    CompileError
        If NVRTC rejects the source.
    """
    if _is_cut or is_ending():
        return compile_in_process(source, arch, nvrtc)
    with in_one_piece():
        from mlagen.compiler.nvrtc import compile_source
    mine = object()
    _under_way.add(mine)
    try:
        return compile_source(source, arch, nvrtc)
    finally:
        _under_way.discard(mine)


def compile_in_process(source: Source, arch: Arch, nvrtc: Nvrtc) -> Cubin:
    """Do the same in a fresh process, which ends with it."""
    if not sys.executable:
        raise ToolchainError("NVRTC: expected a Python to compile in, got none")
    request = {
        "source": asdict(source),
        "arch": asdict(arch),
        "nvrtc": {**asdict(nvrtc), "path": str(nvrtc.path)},
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, *map(str, sys.path)],
            input=json.dumps(request).encode(),
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise ToolchainError(f"NVRTC: cannot compile in a fresh process: {error}") from error
    _, mark, answer = done.stdout.partition(_MARK)
    said = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode != 0 or not mark:
        got = f"status {done.returncode}: {said[-1] if said else 'nothing'}"
        raise ToolchainError(f"NVRTC: expected to compile in a fresh process, got {got}")
    for line in said:
        _logger.warning("%s", line)
    head, _, code = answer.partition(b"\n")
    return _cubin_of(json.loads(head), code, source)


def main() -> None:
    """Be that process: take a request from stdin, answer on stdout."""
    from mlagen.compiler.nvrtc import compile_source

    answer_to = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed is no part of the answer
    request = json.load(sys.stdin.buffer)
    source = Source(text=request["source"]["text"], origins=tuple(request["source"]["origins"]))
    nvrtc = Nvrtc(**{**request["nvrtc"], "path": Path(request["nvrtc"]["path"])})
    head: dict[str, Any]
    code = b""
    try:
        cubin = compile_source(source, Arch(**request["arch"]), nvrtc)
    except CompileError as error:
        head = {"rejected": str(error), "log": error.log}
    except ToolchainError as error:
        head = {"failed": str(error)}
    else:
        head, code = asdict(cubin), cubin.code
        del head["code"]
    with os.fdopen(answer_to, "wb") as answer:
        answer.write(_MARK + json.dumps(head).encode() + b"\n" + code)


def _cubin_of(head: dict[str, Any], code: bytes, source: Source) -> Cubin:
    if "rejected" in head:
        raise CompileError(head["rejected"], log=head["log"], source=source.text)
    if "failed" in head:
        raise ToolchainError(head["failed"])
    resources = tuple(Resources(**one) for one in head.pop("resources"))
    return Cubin(code=code, resources=resources, **head)


def _after_fork() -> None:
    global _is_cut  # noqa: PLW0603 - it is a state of the process
    _is_cut = _is_cut or bool(_under_way)
    _under_way.clear()


os.register_at_fork(after_in_child=_after_fork)
