"""Shells of the pages: this checkout's command, with a fresh home folder for each machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from socket import gethostname
from sysconfig import get_path

from mlagen.compiler.toolchain import find_nvrtc
from tests.doc_text import ROOT

# The machine of a page that has no NVRTC.
SERVE = "serve"


class Shells:
    """The shells of a page, one per machine that its prompts name; all work in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environs: dict[str, dict[str, str]] = {}

    def run(self, machine: str, command: str) -> list[str]:
        """Run a command on a machine; return its output without the names of this machine.

        A command that fails prints its exit code in a last line.
        """
        if machine not in self._environs:
            self._environs[machine] = self._environ(self._folder / f"{machine}-home", machine)
        run = subprocess.run(
            ["/bin/sh", "-c", f'{{ {command}; }} 2>&1 || echo "[exit code $?]"'],
            env=self._environs[machine],
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=True,
        )
        output = run.stdout.replace(self._environs[machine]["HOME"], "~")
        output = output.replace(f", on {gethostname()}", ", on node")
        return output.replace(f"{self._folder}/", "").splitlines()

    def _environ(self, home: Path, machine: str) -> dict[str, str]:
        commands = home / "bin"
        commands.mkdir(parents=True)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MLAGEN_", "XDG_"))
        }
        changes = {
            "HOME": str(home),
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "MLAGEN_LOCK_DIR": str(home / "locks"),
        }
        paths, python = sys.path, f'"{sys.executable}"'
        if machine == SERVE:
            paths, python = [str(_site_without_nvrtc(home / "site"))], f"{python} -S"
            if find_nvrtc().release < (12, 9):  # as the page has it
                changes["MLAGEN_TOOLCHAIN"] = str(find_nvrtc())
        script = commands / "mlagen"
        script.write_text(f'#!/bin/sh\nexec {python} -m cache_tools "$@"\n')
        script.chmod(0o755)
        return inherited | changes | {"PYTHONPATH": os.pathsep.join([str(ROOT), *paths])}


def _site_without_nvrtc(folder: Path) -> Path:
    """Return a folder with all installed packages except NVIDIA's libraries."""
    folder.mkdir()
    for installed in dict.fromkeys((get_path("purelib"), get_path("platlib"))):
        for path in Path(installed).iterdir():
            if not path.name.startswith(("nvidia", "__pycache__")):
                (folder / path.name).symlink_to(path)
    return folder
