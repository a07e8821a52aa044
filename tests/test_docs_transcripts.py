"""Transcripts of the pages are what their commands print; MLAGEN_ACCEPT=1 renews them.

Times, sizes, dates and what depends on the compiler are not compared; a key of a page stands for
one real key, on the whole page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from socket import gethostname
from sysconfig import get_path

import pytest

from mlagen.compiler.toolchain import find_nvrtc
from tests.doc_text import FENCE, PAGES, ROOT, blocks_of, pages_with

RENEW = "renew with: MLAGEN_ACCEPT=1 python3 -m pytest tests/test_docs_transcripts.py"
IMAGE = "docs/how-to/bake-an-image.md"
SERVE = "serve"  # the machine of a page that has no NVRTC
# The part of a call that needs no GPU.
CALL = (
    "import sys; from mlagen.engine import find_or_build; from mlagen.spec.text import parse_spec; "
    "find_or_build(parse_spec(sys.argv[1]))"
)

_PROMPT = re.compile(r"(\w*)\$ (.+)")
_KEY = re.compile(r"\b(?:[0-9a-f]{64}|(?=[a-f]*\d)[0-9a-f]{8})\b")
# What differs between two runs or between compilers, in lines whose spaces are single.
_UNSTABLE = (
    (_KEY.pattern, "KEY"),
    (r"(?<=/v2/)[0-9a-f]{2}(?=/)", "KE"),
    (r"\b\d+(?:\.\d+)? (?:B|KiB|MiB)(?!\w)", "SIZE"),
    (r"\b\d+ (?:s|min|h|d) ago$", "AGE"),
    (r"\b\d+(?:\.\d+)? (?:us|ms|s|min|h)\b", "TIME"),
    (r"\d{4}-\d\d-\d\dT[\d:+]+", "DATE"),
    (r"\d+(?= registers)|\d+(?= bytes )", "COUNT"),
    (r"\d+ \d+(?= SIZE)", "COUNTS"),  # columns of `cache ls`
    (r"nvrtc-[\d.]+", "nvrtc-VERSION"),
    (r"libnvrtc\.so\.\d+", "libnvrtc.so.MAJOR"),
    (r"cuda-bindings \d+", "cuda-bindings MAJOR"),
    (r"nvidia-cuda-nvrtc(?:-cu12)?", "nvidia-cuda-nvrtc"),
)


def masked(line: str) -> str:
    """Return a line without what is not compared."""
    line = " ".join(line.split())
    for pattern, name in _UNSTABLE:
        line = re.sub(pattern, name, line)
    return line


def in_order(lines: list[str]) -> list[str]:
    """Return lines in order, but those of kernels that compile in parallel sorted."""
    groups = groupby(lines, lambda line: line.startswith("built "))
    sort = {True: lambda group: sorted(group, key=masked), False: list}
    return [line for is_built, group in groups for line in sort[is_built](group)]


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


class Transcript:
    """The commands of a page, from first to last in fresh home folders."""

    def __init__(self, folder: Path) -> None:
        self.differences: list[str] = []
        self._shells = Shells(folder)
        self._real: dict[str, str] = {}  # by the page's keys

    def renewed(self, block: re.Match[str]) -> str:
        """Run the commands of a block; return it with what they print where that differs.

        A prompt is ``$``, or ``name$`` for a machine.
        """
        if block["language"] != "console":
            return block[0]
        lines = ["```console"]
        prompts = [*_PROMPT.finditer(block["text"])]
        ends = [*(prompt.start() for prompt in prompts[1:]), len(block["text"])]
        for prompt, end in zip(prompts, ends, strict=True):
            shown = block["text"][prompt.end() : end].splitlines()[1:]
            lines += [prompt[0], *self._printed(prompt[1], prompt[2], shown)]
        return "\n".join((*lines, "```"))

    def _printed(self, machine: str, command: str, shown: list[str]) -> list[str]:
        """Return the shown output of a command if that is right, or else its real one."""
        printed = self._shells.run(machine, _KEY.sub(lambda key: self._key(key[0]), command))
        pairs = list(zip(in_order(shown), in_order(printed), strict=False))
        is_right = len(shown) == len(printed)
        for theirs, ours in pairs:
            is_right &= masked(theirs) == masked(ours)
            for key, real in zip(_KEY.findall(theirs), _KEY.findall(ours), strict=False):
                is_right &= self._real.setdefault(key[:8], real[:8]) == real[:8]
                self._real.setdefault(key, real)
        if not is_right:
            parts = (f"{machine}$ {command}", *printed, "--- is shown as", *shown)
            self.differences.append("\n".join(parts))
        return shown if is_right else printed

    def _key(self, key: str) -> str:
        return self._real.get(key, key)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", pages_with("console"))
def test_a_transcript_is_what_its_commands_print(page: str, tmp_path: Path) -> None:
    """The commands of a page print what it shows."""
    transcript = Transcript(tmp_path)
    renewed = FENCE.sub(transcript.renewed, PAGES[page].read_text(encoding="utf-8"))
    if os.environ.get("MLAGEN_ACCEPT"):
        PAGES[page].write_text(renewed, encoding="utf-8")
    else:
        assert transcript.differences == [], RENEW


def test_the_miss_of_a_call_is_the_one_shown(tmp_path: Path) -> None:
    """The page on images shows the error of a server without a kernel and without NVRTC."""
    text = PAGES[IMAGE].read_text("utf-8")
    (shown,) = (block.text.strip() for block in blocks_of(text) if block.language == "text")
    kernel = shown.split(": ")[1]

    call = f"'{sys.executable}' -S -c '{CALL}' '{kernel}'"
    *_, printed, code = Shells(tmp_path).run(SERVE, call)

    if os.environ.get("MLAGEN_ACCEPT"):
        PAGES[IMAGE].write_text(text.replace(shown, printed), "utf-8")
    else:
        assert (masked(printed), code) == (masked(shown), "[exit code 1]"), RENEW
