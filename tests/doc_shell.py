"""Shell sessions of the pages: run again, and compared with the shown output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from sysconfig import get_path
from typing import NamedTuple

from mlagen.compiler.toolchain import find_nvrtc
from tests.doc_text import ROOT, Block

# Parts of the output that differ between machines, runs and edits of templates.
UNSTABLE = (
    (r"\b(?:[0-9a-f]{64}|(?=[a-f]*\d)[0-9a-f]{8})\b", "KEY"),
    (r"(?:~|(?<![\w./])/[\w.-]+)(?:/[\w.+-]+)+", "FOLDER"),
    (r"\d{4}-\d\d-\d\dT[\d:+]+", "DATE"),
    (r"\b\d+(?:\.\d+)? (?:us|ms|s)\b", "TIME"),
    (r"\b\d+(?:\.\d+)? (?:B|KiB|MiB)(?!\w)", "SIZE"),
    (r"nvrtc-[\d.]+", "nvrtc-VERSION"),
    (r", on [\w.-]+, by", ", on HOST, by"),
    (r"(?<=block_m 16: )\d+", "COUNT"),
    (r"\d+(?= registers)", "COUNT"),
    (r"(?<=[a-f0-9\s])\d+ +(?=0 +SIZE)", "COUNT "),
    (r"\s+", " "),
)

# Parts that depend on the CUDA major version of the installed cuda-bindings.
OF_CUDA = (
    (r"libnvrtc\.so\.\d+", "libnvrtc.so.MAJOR"),
    (r"cuda-bindings \d+", "cuda-bindings MAJOR"),
    (r"nvidia-cuda-nvrtc(?:-cu12)?", "nvidia-cuda-nvrtc"),
    (r"mlagen\[cu\d+\]", "mlagen[cuMAJOR]"),
)


def of_any_cuda(line: str) -> str:
    """Return a line of output independent of the CUDA version."""
    for pattern, name in OF_CUDA:
        line = re.sub(pattern, name, line)
    return line


def stable(line: str) -> str:
    """Return a line of output without its unstable parts."""
    for pattern, name in UNSTABLE:
        line = re.sub(pattern, name, line)
    return of_any_cuda(line).strip()


class Shell:
    """A shell where ``mlagen`` is this checkout's command, and shown keys stand for real ones.

    Parameters
    ----------
    folder : Path
        Folder of the command's script.
    site : Path or None
        A folder to import from in place of this Python's own installation.
    changes : str
        Environment variables.
    """

    def __init__(self, folder: Path, *, site: Path | None = None, **changes: str) -> None:
        self.keys: dict[str, str] = {}
        script = folder / "mlagen"
        python = f'"{sys.executable}"' if site is None else f'"{sys.executable}" -S'
        script.write_text(f'#!/bin/sh\nexec {python} -m cache_tools "$@"\n')
        script.chmod(0o755)
        paths = sys.path if site is None else [str(site)]
        self.environ = {
            **os.environ,
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *paths]),
            **changes,
        }

    def run(self, command: str, shown: list[str], *, folder: Path | None = None) -> list[str]:
        """Run a command of a page; return its output, and record the keys that it shows.

        A command that fails prints its exit code in a last line.
        """
        for key, real in self.keys.items():
            command = command.replace(key, real)
        run = subprocess.run(
            ["/bin/sh", "-c", f'{{ {command}; }} 2>&1 || echo "[exit code $?]"'],
            env=self.environ,
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
        printed = run.stdout.splitlines()
        for line in shown:
            keys = re.findall(UNSTABLE[0][0], line)
            matching = [other for other in printed if stable(other) == stable(line)]
            if keys and len(matching) == 1:
                self.keys |= zip(keys, re.findall(UNSTABLE[0][0], matching[0]), strict=True)
        return printed


_PROMPT = re.compile(r"(\w*)\$ (.+)")


class Session(NamedTuple):
    """A command of a console block: the machine of its prompt, and the shown output."""

    machine: str
    command: str
    shown: list[str]


def sessions_of(block: Block) -> list[Session]:
    """Return the commands of a console block; a prompt is ``$``, or ``name$`` for a machine."""
    sessions: list[Session] = []
    for line in block.text.splitlines():
        if prompt := _PROMPT.match(line):
            sessions.append(Session(prompt[1], prompt[2], []))
        else:
            sessions[-1].shown.append(line)
    return sessions


class Shells:
    """The shells of a page, one per machine that its prompts name.

    Each machine has its own cache, all work in one folder, and ``serve`` has no NVRTC.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shells: dict[str, Shell] = {}

    def run(self, session: Session) -> list[str]:
        """Run a command on its machine; return its output with the paths of the page."""
        if session.machine not in self._shells:
            self._shells[session.machine] = self._shell(session.machine)
        shell = self._shells[session.machine]
        if not session.machine:
            return shell.run(session.command, session.shown)
        output = shell.run(session.command, session.shown, folder=self._folder)
        places = {
            str(self._folder / session.machine / "cache"): "/var/cache/kernels",
            f"{self._folder}/": "",
            str(ROOT): "/src/mlagen",
        }
        for place, name in places.items():
            output = [line.replace(place, name) for line in output]
        return output

    def rewritten(self, page: str, outputs: list[list[str]]) -> str:
        """Return a page with the actual output of its console blocks."""
        lines, left, is_console, is_output = [], list(outputs), False, False
        for line in page.splitlines():
            if line.startswith("```"):
                is_console, is_output = line == "```console", False
            elif is_console and _PROMPT.match(line):
                lines += [line, *left.pop(0)]
                is_output = True
                continue
            if not is_output:
                lines.append(line)
        return "\n".join(lines) + "\n"

    def _shell(self, machine: str) -> Shell:
        if not machine:
            return Shell(self._folder)
        own = self._folder / machine
        own.mkdir()
        changes = {"MLAGEN_CACHE_DIR": str(own / "cache"), "MLAGEN_LOCK_DIR": str(own / "locks")}
        site = _site_without_nvrtc(own / "site") if machine == "serve" else None
        if site is not None and find_nvrtc().release < (12, 9):  # as the page has it
            changes["MLAGEN_TOOLCHAIN"] = str(find_nvrtc())
        return Shell(own, site=site, **changes)


def _site_without_nvrtc(folder: Path) -> Path:
    """Return a folder with all installed packages except NVIDIA's libraries."""
    folder.mkdir()
    for installed in dict.fromkeys((get_path("purelib"), get_path("platlib"))):
        for path in Path(installed).iterdir():
            if not path.name.startswith(("nvidia", "__pycache__")):
                (folder / path.name).symlink_to(path)
    return folder
