"""NVRTC in this process, or in a fresh one where it could hang or crash.

NVRTC holds locks that a fork does not reset: of six children forked while another thread compiled,
one hung in its first compilation. Process exit also destroys state of NVRTC: of 18 processes that
ended while a daemon thread compiled, five crashed (NVRTC 13.5 on 2 cores).
"""

from __future__ import annotations

import json
import logging
import os
import subprocess  # eager: a forked child must not import
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlagen.artifacts import Cubin, Resources, Source
from mlagen.compiler.toolchain import Nvrtc
from mlagen.errors import CompileError, ToolchainError
from mlagen.fork_safety import defer_forks, is_exiting
from mlagen.spec.arch import Arch

# Sets sys.path first, so that nothing is imported from the current folder.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; from mlagen.compiler.nvrtc_process import main; main()"
)
# Marks the start of the answer: other code may print at interpreter startup.
_MARK = b"\nmlagen.compiler.nvrtc_process\n"

_logger = logging.getLogger("mlagen")

_active_compiles: set[object] = set()  # running compilations of this process
_forked_mid_compile = False  # forked during a compilation, also by an ancestor


def compile_anywhere(source: Source, arch: Arch, nvrtc: Nvrtc) -> Cubin:
    """Compile ``source`` for ``arch``, in this process if that is safe.

    Raises
    ------
    ToolchainError
        If NVRTC cannot be loaded or does not know ``arch``, or a required fresh process cannot be
        started.
    CompileError
        If NVRTC rejects the source.
    """
    if _forked_mid_compile or is_exiting():
        return compile_in_process(source, arch, nvrtc)
    with defer_forks():
        from mlagen.compiler.nvrtc import compile_source
    mine = object()
    _active_compiles.add(mine)
    try:
        return compile_source(source, arch, nvrtc)
    finally:
        _active_compiles.discard(mine)


def compile_in_process(source: Source, arch: Arch, nvrtc: Nvrtc) -> Cubin:
    """Compile in a fresh process."""
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
    messages = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode != 0 or not mark:
        got = f"status {done.returncode}: {messages[-1] if messages else 'nothing'}"
        raise ToolchainError(f"NVRTC: expected to compile in a fresh process, got {got}")
    for line in messages:
        _logger.warning("%s", line)
    head, _, code = answer.partition(b"\n")
    return _cubin_of(json.loads(head), code, source)


def main() -> None:
    """Run the fresh process: read a request from stdin, write the answer to stdout."""
    from mlagen.compiler.nvrtc import compile_source

    answer_to = os.dup(1)
    os.dup2(2, 1)  # other output goes to stderr, not into the answer
    request = json.load(sys.stdin.buffer)
    source = Source(**{**request["source"], "origins": tuple(request["source"]["origins"])})
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
    global _forked_mid_compile  # noqa: PLW0603 - process-wide state
    _forked_mid_compile = _forked_mid_compile or bool(_active_compiles)
    _active_compiles.clear()


os.register_at_fork(after_in_child=_after_fork)
