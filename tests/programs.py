"""Programs in processes of their own, forked from one that has imported torch and nothing else.

Importing torch takes longer than most programs.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

METHOD: Literal["forkserver"] = "forkserver"


def preload_torch() -> None:
    """Let processes that are started by this method begin with torch."""
    multiprocessing.get_context(METHOD).set_forkserver_preload(["torch"])


def run_program(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    timeout: float | None = None,
    **_: object,
) -> subprocess.CompletedProcess[str]:
    """Do as ``subprocess.run`` does with the output captured as text, and without a check.

    The command is that of a Python: options ``-W error`` and ``-c`` or ``-m``, or a file.
    """
    preload_torch()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        given = (list(command[1:]), cwd, dict(env), outputs)
        process = multiprocessing.get_context(METHOD).Process(target=_main, args=given)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            assert timeout is not None
            raise subprocess.TimeoutExpired(command, timeout)
        texts = [path.read_text(encoding="utf-8") if path.exists() else "" for path in outputs]
    return subprocess.CompletedProcess(list(command), process.exitcode, *texts)


def _main(arguments: list[str], cwd: Path, env: dict[str, str], outputs: list[Path]) -> None:
    for number, path in enumerate(outputs, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for name in [name for name in sys.modules if name.partition(".")[0] in {"mlagen", "tests"}]:
        del sys.modules[name]  # a program has modules of its own
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    while arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        sys.warnoptions.append(arguments[1])
        del arguments[:2]
    try:
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
        elif arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0] = str(Path(arguments[0]).parent)
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out
